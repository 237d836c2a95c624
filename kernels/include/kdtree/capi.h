/* kdtree-engine: the C interface.
 *
 * Every kernel is one exported function, named kdtree_<kernel>, that takes its op's argument struct and a stream:
 *
 *     int kdtree_verify_attn_flash(const kdtree_verify_attn_args* args, void* stream);
 *
 * It returns KDTREE_OK or a negative kdtree_status. After a failure kdtree_last_error() holds one line for people: the
 * argument's name, what came, what was expected, what to do. Nothing here exits, prints, allocates device memory,
 * synchronises or reads device memory from the host, so every call may be captured into a CUDA graph.
 *
 * Two libraries export this interface. libkdtree runs on a GPU: pointers are device pointers, stream is a cudaStream_t.
 * libkdtree_host runs the same kernel sources on the CPU: pointers are host pointers, stream must be null and the call
 * returns when the work is done.
 *
 * Tensors are row-major, and dense where no stride is named. Shapes use: batch = requests, q_len = tree nodes a request
 * (root included), num_heads = query heads, kv_len = keys a request, d_latent = width of the latent part (it is also
 * the value), d_rope = width of the rotary part. A kv row is [latent | rope].
 */
#ifndef KDTREE_CAPI_H_
#define KDTREE_CAPI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KDTREE_API __declspec(dllexport)
#else
#define KDTREE_API __attribute__((visibility("default")))
#endif

/* Raised whenever a struct or the meaning of an argument changes. */
#define KDTREE_ABI_VERSION 3

typedef enum kdtree_status {
  KDTREE_OK = 0,
  KDTREE_INVALID_ARGUMENT = -1,    /* a null, misaligned or contradictory argument */
  KDTREE_OUT_OF_RANGE = -2,        /* a size outside the kernel's limits */
  KDTREE_UNSUPPORTED = -3,         /* a geometry, device or build this library has no kernel for */
  KDTREE_WORKSPACE_TOO_SMALL = -4, /* see kdtree_<op>_workspace_size */
  KDTREE_ABI_MISMATCH = -5,        /* args->struct_size is not this library's */
  KDTREE_LAUNCH_FAILED = -6        /* the device refused the launch */
} kdtree_status;

/* KDTREE_ABI_VERSION of the library, to be compared with that of the header. */
KDTREE_API int kdtree_abi_version(void);

/* The last failure of this thread as one line; never null. Valid until this thread's next failing call. */
KDTREE_API const char* kdtree_last_error(void);

/* "cuda" or "host". */
KDTREE_API const char* kdtree_build_place(void);

/* Architectures with machine code in this library, as "sm_90 sm_120a"; "host" for the host build. */
KDTREE_API const char* kdtree_build_archs(void);

/* One row of the kernel table. Strings are static. */
typedef struct kdtree_kernel_info {
  const char* name;       /* symbol without its "kdtree_" */
  const char* op;         /* its op; kernels of one op take the same argument struct */
  const char* dtype;      /* of its floating-point input: "float32" or "bfloat16"; "any" when it only moves bytes */
  const char* layout;     /* "dense" or "paged" */
  const char* geometries; /* d_latent/d_rope pairs, as "512/64 512/0"; empty when it has none */
  const char* archs;      /* what the kernel's instructions need: "sm_80+" */
  int32_t phase;          /* the pipeline phase that proves it */
  int64_t shared_bytes;   /* the most dynamic shared memory a block of it asks for */
} kdtree_kernel_info;

KDTREE_API int kdtree_num_kernels(void);

/* Row `index`, or null when index is out of range. */
KDTREE_API const kdtree_kernel_info* kdtree_kernel_at(int index);

/* ------------------------------------------------------------------------------------------------------------------
 * Op verify_attn: tree-verify attention over a dense latent cache, float32.
 *
 *   s[b,i,h,j]   = sm_scale * <q[b,i,h,:], kv[b,j,:]>            where mask[b,i,j] != 0 and j < kv_lens[b]
 *   lse[b,i,h]   = log(sum_j exp(s[b,i,h,j]))                    natural logarithm
 *   out[b,i,h,:] = sum_j exp(s[b,i,h,j] - lse[b,i,h]) kv[b,j,:d_latent]
 *
 * A row that sees no key gives out = 0 and lse = -inf. A key that a row does not see has no influence on it, whatever
 * it holds (NaN included); keys at and past kv_lens[b] are never read.
 */
typedef struct kdtree_verify_attn_args {
  size_t struct_size; /* sizeof(kdtree_verify_attn_args) */

  const float* q;         /* [batch, q_len, num_heads, d_latent + d_rope], 16-byte aligned */
  const float* kv;        /* [batch, kv_len, d_latent + d_rope], 16-byte aligned */
  const uint8_t* mask;    /* [batch, q_len, kv_len], nonzero = visible; null: every key is visible */
  const int32_t* kv_lens; /* [batch], keys in use, clamped to 0..kv_len; null: kv_len */
  float* out;             /* [batch, q_len, num_heads, d_latent], 16-byte aligned */
  float* lse;             /* [batch, q_len, num_heads] */
  void* workspace;        /* 16-byte aligned; may be null when the size query says 0 */
  size_t workspace_size;  /* bytes at workspace */

  int64_t batch;     /* 1..65535 */
  int64_t q_len;     /* 1..256 */
  int64_t num_heads; /* 1..128 */
  int64_t kv_len;    /* 1..262144 */
  int64_t d_latent;  /* with d_rope one of 512/64, 512/0, 256/64, 256/32 */
  int64_t d_rope;
  int64_t split_tokens; /* keys a block walks alone, a multiple of 64; 0: chosen from q_len, num_heads and kv_len.
                           Neither it nor the result's bits depend on what stands beside a request in the batch. */
  float sm_scale;       /* > 0 and finite; there is no default */
} kdtree_verify_attn_args;

/* Bytes of workspace that any kernel of the op needs for these sizes; only struct_size and the sizes are read. */
KDTREE_API int kdtree_verify_attn_workspace_size(const kdtree_verify_attn_args* args, size_t* bytes);

/* One block a row, keys in order: the kernel the others are measured against. */
KDTREE_API int kdtree_verify_attn(const kdtree_verify_attn_args* args, void* stream);

/* Row tiles in registers, keys streamed through shared memory, prefix split over the chip. */
KDTREE_API int kdtree_verify_attn_flash(const kdtree_verify_attn_args* args, void* stream);

/* ------------------------------------------------------------------------------------------------------------------
 * Op verify_attn_paged: tree-verify attention over a paged latent cache, bfloat16, ragged batches.
 *
 * Request b has n = qo_indptr[b+1] - qo_indptr[b] tree nodes (0..256) and a prefix of P cached tokens. Its key rows are
 * the P prefix rows of the pool and then one draft row a node. With s = sm_scale * <q, k>, capped as
 * logit_cap * tanh(s / logit_cap) where logit_cap > 0, node i sees the whole prefix and the nodes that `visibility`
 * names, wherever they stand:
 *
 *   lse[t,h]   = log(sum_j exp(s[t,h,j]))                    natural logarithm
 *   out[t,h,:] = sum_j exp(s[t,h,j] - lse[t,h]) k[j,:d_latent]
 *
 * A row that sees no key gives out = 0 and lse = -inf. A row that a node does not see has no influence on it, whatever
 * it holds. A request with n = 0, the rows of q and out outside qo_indptr, and kv_indices behind the live part are
 * neither read nor written. Where the two indptr disagree with the capacities below, what would lie outside is left
 * out.
 *
 * bfloat16 is two bytes, the upper half of a float. Strides count elements.
 */
typedef enum kdtree_index_type { KDTREE_INT32 = 0, KDTREE_INT64 = 1 } kdtree_index_type;

typedef enum kdtree_float_type { KDTREE_BFLOAT16 = 0, KDTREE_FLOAT32 = 1 } kdtree_float_type;

typedef enum kdtree_visibility {
  KDTREE_CAUSAL = 0,     /* a chain: node i sees nodes 0..i; visibility is null */
  KDTREE_MASK_BYTES = 1, /* uint8, n x n a request, nonzero = visible; request b starts at mask_indptr[b] */
  KDTREE_MASK_BITS = 2,  /* uint64 [total_q, mask_stride], bit j % 64 of word j / 64: the row's node sees node j */
  KDTREE_PARENTS = 3,  /* int32 [total_q], parent node in the request, negative for a root: sees itself and ancestors */
  KDTREE_FULL_MASK = 4 /* uint8, n x (P + n) a request; the P prefix columns are not read; starts as MASK_BYTES */
} kdtree_visibility;

typedef struct kdtree_verify_attn_paged_args {
  size_t struct_size; /* sizeof(kdtree_verify_attn_paged_args) */

  const void* q;           /* bfloat16 [total_q, num_heads, d_latent + d_rope], 16-byte aligned */
  const void* kv_pool;     /* bfloat16 [num_slots, d_latent + d_rope], 16-byte aligned; slot = page * page_size + i */
  const void* draft_kv;    /* bfloat16 [total_q, d_latent + d_rope], 16-byte aligned; null: the pool's draft_slots */
  const void* draft_slots; /* [total_q], the pool's slot of each draft row; read only when draft_kv is null */
  const void* qo_indptr;   /* [batch + 1], first row of each request in q */
  const void* kv_indptr;   /* [batch + 1], first entry of each request in kv_indices; null: the page table form */
  const void* kv_indices;  /* with kv_indptr: [num_kv_indices] slots of the prefix tokens, page_size 1;
                              without: page table [batch, num_kv_indices], the pages of a request in order */
  const void* kv_lens;     /* [batch], P of each request; page table form only */
  const void* visibility;  /* see kdtree_visibility */
  const int64_t* mask_indptr; /* [batch + 1] for the byte masks; null: requests follow each other without a gap */
  void* out;                  /* out_type [total_q, num_heads, d_latent], 16-byte aligned */
  float* lse;                 /* [total_q, num_heads] */
  void* workspace;            /* 16-byte aligned; contents before and after are of no importance */
  size_t workspace_size;      /* bytes at workspace */

  int64_t batch;     /* 1..512 */
  int64_t total_q;   /* rows of q: a capacity, at least qo_indptr[batch] */
  int64_t max_q_len; /* the most nodes that a request has, 1..256; a request with more is left out */
  int64_t num_heads; /* 1..128 */
  int64_t d_latent;  /* with d_rope one of 512/64, 512/0, 256/64, 256/32 */
  int64_t d_rope;
  int64_t q_stride_token; /* multiples of 8, as the other strides of rows */
  int64_t q_stride_head;
  int64_t kv_stride;       /* between slots */
  int64_t draft_kv_stride; /* between draft rows; read only with draft_kv */
  int64_t num_slots;       /* of the pool, below 2^31; a slot outside 0..num_slots-1 counts as a row of zeros. Slots are
                              worked out modulo 2^32: 64-bit entries are read by their lower halves */
  int64_t page_size;       /* 1 with kv_indptr; 16, 32, 64, 128 or 256 in the page table form */
  int64_t num_kv_indices;  /* with kv_indptr: entries of kv_indices; page table form: columns */
  int64_t page_table_stride; /* between the page table's rows; read only in the page table form */
  int64_t mask_stride;       /* words between rows of KDTREE_MASK_BITS, 1..4 */
  int64_t mask_size;         /* bytes at visibility for the byte masks; cells at and past it count as hidden */
  int64_t split_tokens; /* keys a block walks alone, a multiple of 16; 0: chosen on the device from the whole batch.
                           When it is fixed, a request's bits depend on itself, max_q_len and num_heads alone. */
  int64_t max_kv_len;   /* the longest P there will be, 0..262144. With split_tokens it sizes the workspace; without, it
                           is a hint, 0 for none */
  int32_t qo_indptr_type; /* kdtree_index_type */
  int32_t kv_indptr_type;
  int32_t kv_indices_type;
  int32_t kv_lens_type;
  int32_t draft_slots_type;
  int32_t visibility_type; /* kdtree_visibility */
  int32_t out_type;        /* kdtree_float_type */
  int32_t skip_prefix; /* nonzero: the prefix is left out (P counts as 0, except as KDTREE_FULL_MASK's row length) */
  int32_t skip_draft;  /* nonzero: the draft rows are left out; visibility is not read */
  float sm_scale;      /* > 0 and finite; there is no default */
  float logit_cap;     /* >= 0 and finite; 0: no cap */
} kdtree_verify_attn_paged_args;

/* Bytes of workspace for these capacities: batch, total_q, max_q_len, num_heads, d_latent, split_tokens, max_kv_len,
   and the current device. Only struct_size and the sizes are read. */
KDTREE_API int kdtree_verify_attn_paged_workspace_size(const kdtree_verify_attn_paged_args* args, size_t* bytes);

/* Tensor cores (bf16 mma, float32 accumulation), prefix split over the chip by a plan made on the device. */
KDTREE_API int kdtree_verify_attn_flash_paged(const kdtree_verify_attn_paged_args* args, void* stream);

/* ------------------------------------------------------------------------------------------------------------------
 * Op merge_partials: joins attention results over disjoint sets of keys, such as those of ranks that each hold a part
 * of the context.
 *
 *   lse[r]   = log(sum_p exp(lses[p,r]))
 *   out[r,:] = sum_p exp(lses[p,r] - lse[r]) outs[p,r,:]
 *
 * A part with lse = -inf saw nothing and is not read; a row without any other part gives out = 0 and lse = -inf.
 */
typedef struct kdtree_merge_partials_args {
  size_t struct_size; /* sizeof(kdtree_merge_partials_args) */

  const void* outs;  /* in_type [num_parts, num_rows, d_latent], 16-byte aligned */
  const float* lses; /* [num_parts, num_rows], natural logarithm */
  void* out;         /* out_type [num_rows, d_latent], 16-byte aligned; not one of outs */
  float* lse;        /* [num_rows]; may be null */

  int64_t num_parts; /* 1..1024 */
  int64_t num_rows;  /* 1..2^31 - 1 */
  int64_t d_latent;  /* 256 or 512 */
  int32_t in_type;   /* kdtree_float_type */
  int32_t out_type;
} kdtree_merge_partials_args;

KDTREE_API int kdtree_merge_partials(const kdtree_merge_partials_args* args, void* stream);

/* ------------------------------------------------------------------------------------------------------------------
 * A round of tree speculative decoding around verify attention: tree_build, tree_accept, kv_compact.
 *
 * Each works on a batch of requests. What is wrong with one request is said in its status word, the OR of the flags
 * below; it never harms the others, and a request with a bad status is left in a state that a server can go on from.
 *
 * Trees come in one of two layouts. Padded, as tree_build writes them: request b has rows b * max_q_len and on, of
 * which the first num_nodes[b] are its nodes. Ragged: with qo_indptr, request b has rows qo_indptr[b]..qo_indptr[b+1].
 */
typedef enum kdtree_request_status {
  KDTREE_REQUEST_OK = 0,
  KDTREE_NOT_A_NUMBER = 1,      /* NaN or +inf among log_probs, NaN among logits, or a uniform outside [0, 1) */
  KDTREE_RISING = 2,            /* a row of log_probs is not in falling order */
  KDTREE_REPEATED_TOKEN = 4,    /* a row of token_ids names a token twice */
  KDTREE_SIZE_OUT_OF_RANGE = 8, /* a size of the request is outside the capacities of the call */
  KDTREE_BAD_TREE = 16,         /* a parent or link is out of range, cyclic, or does not come before its child */
  KDTREE_PATH_TOO_LONG = 32,    /* the accepted path does not fit in max_path */
  KDTREE_BAD_PATH = 64,         /* not rising, or outside the request's nodes */
  KDTREE_BAD_SLOT = 128         /* a node's slot is outside the pool */
} kdtree_request_status;

/* Op tree_build: the draft tree of the most probable prefixes, best first (DDTree).
 *
 * The drafter gives marginals: row d holds the candidates at depth d + 1. A prefix is a choice of candidate ranks, its
 * score the float64 sum of their log-probabilities. Nodes are made in falling order of score, equal scores by the
 * smaller rank tuple; the root is node 0. The score of a first child is its parent's plus log_probs; that of the next
 * sibling is the previous sibling's, minus its own log-probability, plus the next one's, rounded in this order. A
 * prefix of score -inf is never made. A row that holds NaN or +inf, rises, or repeats a token sets the status, and
 * neither it nor the rows after it are used: the tree stays valid, and may be the root alone.
 *
 * Rows from num_nodes[b] to max_nodes - 1 hold roots without children: the root's token and position, parent -1,
 * visible to themselves alone.
 */
typedef struct kdtree_tree_build_args {
  size_t struct_size; /* sizeof(kdtree_tree_build_args) */

  const float* log_probs;    /* [batch, max_depth, max_width], falling along a row; may be null when max_depth is 0 */
  const void* token_ids;     /* token_type [batch, max_depth, max_width]; likewise */
  const void* root_tokens;   /* token_type [batch] */
  const int32_t* budgets;    /* [batch], nodes below the root, 0..max_nodes-1; null: max_nodes - 1 */
  const int32_t* num_depths; /* [batch], rows in use, 0..max_depth; null: max_depth */
  const int32_t* widths;     /* [batch], columns in use, 1..max_width; null: max_width */
  const void* seq_lens;      /* seq_lens_type [batch], committed tokens before the root; null: 0 */

  void* tokens;               /* token_type [batch, max_nodes] */
  int32_t* parents;           /* [batch, max_nodes], node in the request, -1 for the root */
  int32_t* depths;            /* [batch, max_nodes]; this and the next six may be null */
  void* positions;            /* index_type [batch, max_nodes], seq_len + depth */
  uint8_t* visibility;        /* [batch, max_nodes, max_nodes], 1 for a node itself and its ancestors */
  uint64_t* visibility_bits;  /* [batch, max_nodes, (max_nodes + 63) / 64], bit j % 64 of word j / 64: sees node j */
  void* retrive_index;        /* index_type [batch, max_nodes], row among all: b * max_nodes + i */
  void* retrive_next_token;   /* index_type [batch, max_nodes], first child, -1 for none */
  void* retrive_next_sibling; /* index_type [batch, max_nodes], -1 for none */
  int32_t* num_nodes;         /* [batch], nodes made, the root counted */
  int32_t* status;            /* [batch], kdtree_request_status */

  int64_t batch;      /* 1..65535 */
  int64_t max_depth;  /* 0..32 */
  int64_t max_width;  /* 1..64 */
  int64_t max_nodes;  /* 1..1025, the root counted */
  int32_t token_type; /* kdtree_index_type */
  int32_t index_type;
  int32_t seq_lens_type;
} kdtree_tree_build_args;

KDTREE_API int kdtree_tree_build(const kdtree_tree_build_args* args, void* stream);

/* Op tree_accept: the path along which the draft tree agrees with the target.
 *
 * Every node has a target token: given, or the most probable by its logits (of equals the lower), or drawn from
 * softmax(logits / temperature) by its uniform u: the first token whose cumulative probability exceeds u. (One that is
 * 2^126 times less probable than the most probable counts as impossible.) From the root on, the walk goes to the first
 * child that holds the present node's target token; the target token of the last node is the bonus. Drawing at each
 * node and walking is lossless, since a node's logits depend on its own ancestors.
 *
 * A request with a bad status accepts nothing: path_len and accept_token_num 0, bonus -1, no row in path, accept_index
 * and predicts.
 */
typedef enum kdtree_target {
  KDTREE_TARGET_TOKENS = 0, /* target_tokens */
  KDTREE_TARGET_ARGMAX = 1, /* logits */
  KDTREE_TARGET_SAMPLE = 2  /* logits and uniforms */
} kdtree_target;

typedef struct kdtree_tree_accept_args {
  size_t struct_size; /* sizeof(kdtree_tree_accept_args) */

  const void* tokens;               /* token_type [total_q] */
  const int32_t* parents;           /* [total_q], negative for the root; null: the two links */
  const void* retrive_next_token;   /* index_type [total_q], first child, -1 for none; read only without parents */
  const void* retrive_next_sibling; /* index_type [total_q], -1 for none */
  const void* qo_indptr;            /* qo_indptr_type [batch + 1]; null: the padded layout */
  const int32_t* num_nodes;         /* [batch], 0..max_q_len; null: max_q_len. Padded layout only */
  const void* target_tokens;        /* token_type [total_q], with KDTREE_TARGET_TOKENS */
  const void* logits;               /* logits_type [total_q, vocab_size], 16-byte aligned */
  const float* uniforms;            /* [total_q], in [0, 1) */

  int32_t* path;             /* [batch, max_path], accepted nodes in the request, root first, -1 behind */
  int32_t* path_len;         /* [batch] */
  void* bonus;               /* token_type [batch] */
  void* node_targets;        /* token_type [total_q], every node's target token, -1 where there is none; this and the
                                next three may be null */
  int32_t* accept_index;     /* [batch, max_path], accepted rows among all, -1 behind */
  int32_t* accept_token_num; /* [batch], accepted drafts, the root not counted */
  int32_t* predicts;         /* [total_q], the target token of each accepted row, 0 in a request's other rows. Of a
                                ragged batch, rows outside of all requests are left alone */
  int32_t* status;           /* [batch], kdtree_request_status */
  void* workspace;           /* 16-byte aligned; may be null when the size query says 0 */
  size_t workspace_size;     /* bytes at workspace */

  int64_t batch;         /* 1..65535 */
  int64_t total_q;       /* rows; padded layout: batch * max_q_len */
  int64_t max_q_len;     /* the most nodes of a request, 1..1025 */
  int64_t max_path;      /* 1..1025; the tree's greatest depth + 1 always suffices */
  int64_t vocab_size;    /* 1..2^31 - 1, with logits */
  int64_t logits_stride; /* elements between rows of logits, at least vocab_size */
  float temperature;     /* > 0 and finite, with KDTREE_TARGET_SAMPLE */
  int32_t target;        /* kdtree_target */
  int32_t logits_type;   /* kdtree_float_type */
  int32_t token_type;    /* kdtree_index_type */
  int32_t index_type;
  int32_t qo_indptr_type;
} kdtree_tree_accept_args;

/* Bytes of workspace for these capacities: total_q, vocab_size, target. Only struct_size and the sizes are read. */
KDTREE_API int kdtree_tree_accept_workspace_size(const kdtree_tree_accept_args* args, size_t* bytes);

KDTREE_API int kdtree_tree_accept(const kdtree_tree_accept_args* args, void* stream);

/* Op kv_compact: after acceptance, the accepted nodes' cache rows move to the request's first node slots, in all layers
 * at once.
 *
 *   pool[layer][slot(k)] = pool[layer][slot(path[k])]   for k < path_len        committed: slot(0)..slot(path_len - 1)
 *
 * slot(i) is node i's slot: node_slots, or, with a page table, page_table[b][p / page_size] * page_size + p % page_size
 * for p = kv_lens[b] + i. The slots of all nodes of a batch must differ. A path rises, so path[k] >= k, and every row
 * is read before it is overwritten. Nothing but committed rows is written; those with path[k] = k are left alone. Slots
 * of the nodes from path_len on are free. A request with a bad status moves, commits and frees nothing.
 */
typedef struct kdtree_kv_compact_args {
  size_t struct_size; /* sizeof(kdtree_kv_compact_args) */

  void* pool;               /* layer 0's rows; layer l begins layer_stride * l bytes later; null: layer_pools */
  void* const* layer_pools; /* [num_layers] addresses, themselves in device memory; null: pool */
  const void* node_slots;   /* slots_type, a slot for each row; null: the page table form */
  const void* page_table;   /* slots_type [batch, page_table_columns], a request's pages in order */
  const void* kv_lens;      /* kv_lens_type [batch], cached tokens before the root; page table form only */
  const void* qo_indptr;    /* qo_indptr_type [batch + 1]; null: the padded layout */
  const int32_t* num_nodes; /* [batch], 0..max_q_len; null: max_q_len. Padded layout only */
  const int32_t* path;      /* [batch, max_path] of tree_accept */
  const int32_t* path_len;  /* [batch], 0..min(nodes, max_path) */

  void* committed_slots; /* slots_type [batch, max_path], -1 behind; may be null */
  void* free_slots;      /* slots_type [batch, max_q_len], -1 behind; may be null */
  int32_t* num_free;     /* [batch]; may be null */
  int32_t* status;       /* [batch], kdtree_request_status */

  int64_t batch;              /* 1..65535 */
  int64_t total_q;            /* rows; padded layout: batch * max_q_len */
  int64_t max_q_len;          /* 1..1025 */
  int64_t max_path;           /* 1..1025 */
  int64_t num_layers;         /* 1..65535 */
  int64_t num_slots;          /* of each layer's pool */
  int64_t row_bytes;          /* of a row: elements times their size, 1..65536 */
  int64_t slot_stride;        /* bytes between slots, at least row_bytes */
  int64_t layer_stride;       /* bytes between layers; read only with pool */
  int64_t page_size;          /* 1..65536; page table form only */
  int64_t page_table_columns; /* page table form only */
  int64_t page_table_stride;  /* elements between the page table's rows; page table form only */
  int32_t slots_type;         /* kdtree_index_type */
  int32_t kv_lens_type;
  int32_t qo_indptr_type;
} kdtree_kv_compact_args;

KDTREE_API int kdtree_kv_compact(const kdtree_kv_compact_args* args, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KDTREE_CAPI_H_ */
