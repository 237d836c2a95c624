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
#define KDTREE_ABI_VERSION 2

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
  const char* dtype;      /* of q and kv: "float32" or "bfloat16" */
  const char* layout;     /* "dense" or "paged" */
  const char* geometries; /* d_latent/d_rope pairs, as "512/64 512/0" */
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

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KDTREE_CAPI_H_ */
