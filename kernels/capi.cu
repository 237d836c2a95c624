// The C interface: the kernel table, the checks of every argument, the last error. No arithmetic on tensors.

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "kdtree/capi.h"
#include "kv_compact/kv_compact.cuh"
#include "merge_partials/merge_partials.cuh"
#include "tree_accept/tree_accept.cuh"
#include "tree_build/tree_build.cuh"
#include "verify_attn/verify_attn.cuh"
#include "verify_attn/verify_attn_paged.cuh"

#if KDTREE_HOST_BUILD
#define KDTREE_BUILD_ARCHS "host"
#elif !defined(KDTREE_BUILD_ARCHS)
#error "KDTREE_BUILD_ARCHS: not defined; the build must name the architectures, as \"sm_90 sm_120a\""
#endif

namespace kdtree {
namespace {

// A string, not an array: thread-local storage of a library that is loaded at run time is scarce.
thread_local std::string last_error;

__attribute__((format(printf, 2, 3))) int fail(kdtree_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char line[512];
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  last_error = line;
  return status;
}

const char* const kGeometries = "512/64 512/0 256/64 256/32";

int check_range(const char* name, int64_t value, int64_t least, int64_t most, const char* next_step) {
  if (value >= least && value <= most) return KDTREE_OK;
  return fail(KDTREE_OUT_OF_RANGE, "%s: got %lld, expected %lld..%lld; %s", name, static_cast<long long>(value),
              static_cast<long long>(least), static_cast<long long>(most), next_step);
}

int check_pointer(const char* name, const void* pointer, size_t alignment, bool nullable) {
  if (pointer == nullptr) {
    if (nullable) return KDTREE_OK;
    return fail(KDTREE_INVALID_ARGUMENT, "%s: got a null pointer, expected a tensor; allocate it before the call",
                name);
  }
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "%s: got address %p, expected one aligned to %zu bytes; copy the tensor to an aligned buffer", name,
                pointer, alignment);
  }
  if (const char* problem = pointer_problem(pointer)) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "%s: the address %s, expected memory of the current device; copy the tensor there", name, problem);
  }
  return KDTREE_OK;
}

// A struct of this ABI.
template <class Args>
int check_struct(const char* type, const Args* args) {
  if (args == nullptr) {
    return fail(KDTREE_INVALID_ARGUMENT, "args: got a null pointer, expected a %s; pass its address", type);
  }
  if (args->struct_size != sizeof(Args)) {
    return fail(
        KDTREE_ABI_MISMATCH,
        "struct_size: got %zu, expected %zu (ABI version %d); rebuild the caller with this library's kdtree/capi.h",
        args->struct_size, sizeof(Args), KDTREE_ABI_VERSION);
  }
  return KDTREE_OK;
}

int check_geometry(int64_t d_latent, int64_t d_rope) {
  const bool known =
      (d_latent == 512 && (d_rope == 64 || d_rope == 0)) || (d_latent == 256 && (d_rope == 64 || d_rope == 32));
  if (known) return KDTREE_OK;
  return fail(KDTREE_UNSUPPORTED, "d_latent/d_rope: got %lld/%lld, expected one of %s; other geometries have no kernel",
              static_cast<long long>(d_latent), static_cast<long long>(d_rope), kGeometries);
}

int check_split_tokens(int64_t split_tokens, int tile) {
  if (split_tokens >= 0 && split_tokens % tile == 0) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT,
              "split_tokens: got %lld, expected 0 or a positive multiple of %d; 0 lets the library choose",
              static_cast<long long>(split_tokens), tile);
}

int check_sm_scale(float sm_scale) {
  if (sm_scale > 0.0f && !std::isinf(sm_scale)) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT,
              "sm_scale: got %g, expected a finite number > 0; pass the model's softmax scale, yarn factor included",
              static_cast<double>(sm_scale));
}

// What a size query and a launch both need: a struct of this ABI and sizes within the limits.
int check_sizes(const kdtree_verify_attn_args* args) {
  int status = check_struct("kdtree_verify_attn_args", args);
  if (status == KDTREE_OK) status = check_range("batch", args->batch, 1, 65535, "split the batch into several calls");
  if (status == KDTREE_OK) status = check_range("q_len", args->q_len, 1, 256, "draft a smaller tree");
  if (status == KDTREE_OK)
    status = check_range("num_heads", args->num_heads, 1, 128, "split the heads into several calls");
  if (status == KDTREE_OK) status = check_range("kv_len", args->kv_len, 1, 262144, "shorten the context");
  if (status == KDTREE_OK) status = check_geometry(args->d_latent, args->d_rope);
  if (status == KDTREE_OK) status = check_split_tokens(args->split_tokens, kVerifyAttnKeyTile);
  return status;
}

int check(const kdtree_verify_attn_args* args) {
  int status = check_sizes(args);
  if (status == KDTREE_OK) status = check_sm_scale(args->sm_scale);
  if (status == KDTREE_OK) status = check_pointer("q", args->q, 16, false);
  if (status == KDTREE_OK) status = check_pointer("kv", args->kv, 16, false);
  if (status == KDTREE_OK) status = check_pointer("mask", args->mask, 1, true);
  if (status == KDTREE_OK) status = check_pointer("kv_lens", args->kv_lens, 4, true);
  if (status == KDTREE_OK) status = check_pointer("out", args->out, 16, false);
  if (status == KDTREE_OK) status = check_pointer("lse", args->lse, 4, false);
  return status;
}

constexpr int64_t kMostInt = 2147483647;

int check_type(const char* name, int32_t type, int32_t most, const char* expected) {
  if (type >= 0 && type <= most) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT, "%s: got %d, expected one of %s; see kdtree/capi.h", name, type, expected);
}

// Of rows that lie `stride` apart and are read sixteen bytes at a time.
int check_row_stride(const char* name, int64_t stride, int64_t width) {
  if (stride >= width && stride % 8 == 0 && stride <= kMostInt / 2) return KDTREE_OK;
  return fail(
      KDTREE_INVALID_ARGUMENT,
      "%s: got %lld elements, expected a multiple of 8 from %lld to %lld, so that rows are aligned to 16 bytes and "
      "do not overlap; copy the tensor to one with such strides",
      name, static_cast<long long>(stride), static_cast<long long>(width), static_cast<long long>(kMostInt / 2));
}

int check_absent(const char* name, const void* pointer, const char* reason) {
  if (pointer == nullptr) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT, "%s: got a pointer, expected null %s; leave it out", name, reason);
}

int check_indices(const char* name, const void* pointer, int32_t type, const char* type_name, bool empty = false) {
  const int status = check_type(type_name, type, KDTREE_INT64, "0 (int32), 1 (int64)");
  return status == KDTREE_OK ? check_pointer(name, pointer, type == KDTREE_INT64 ? 8 : 4, empty) : status;
}

int check_sizes(const kdtree_verify_attn_paged_args* args) {
  int status = check_struct("kdtree_verify_attn_paged_args", args);
  if (status == KDTREE_OK) status = check_range("batch", args->batch, 1, 512, "split the batch into several calls");
  if (status == KDTREE_OK)
    status = check_range("total_q", args->total_q, 1, 131072, "split the batch into several calls");
  if (status == KDTREE_OK) status = check_range("max_q_len", args->max_q_len, 1, 256, "draft smaller trees");
  if (status == KDTREE_OK)
    status = check_range("num_heads", args->num_heads, 1, 128, "split the heads into several calls");
  if (status == KDTREE_OK) status = check_geometry(args->d_latent, args->d_rope);
  if (status == KDTREE_OK) status = check_split_tokens(args->split_tokens, kVerifyAttnPagedKeyTile);
  if (status == KDTREE_OK) status = check_range("max_kv_len", args->max_kv_len, 0, 262144, "shorten the context");
  return status;
}

// Where the keys are: slots behind kv_indptr, or a page table.
int check_keys(const kdtree_verify_attn_paged_args& args) {
  int status = check_range("num_kv_indices", args.num_kv_indices, 0, kMostInt, "pass the length of kv_indices");
  if (status == KDTREE_OK) {
    status =
        check_indices("kv_indices", args.kv_indices, args.kv_indices_type, "kv_indices_type", args.num_kv_indices == 0);
  }
  if (status != KDTREE_OK) return status;
  if (args.kv_indptr != nullptr) {
    status = check_indices("kv_indptr", args.kv_indptr, args.kv_indptr_type, "kv_indptr_type");
    if (status == KDTREE_OK) status = check_absent("kv_lens", args.kv_lens, "beside kv_indptr");
    if (status == KDTREE_OK && args.page_size != 1) {
      status = fail(KDTREE_INVALID_ARGUMENT,
                    "page_size: got %lld, expected 1 beside kv_indptr; pass a page table and kv_lens instead",
                    static_cast<long long>(args.page_size));
    }
    return status;
  }
  if (args.kv_lens == nullptr) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "kv_indptr: got a null pointer, expected kv_indptr, or kv_lens with a page table; pass one of them");
  }
  status = check_indices("kv_lens", args.kv_lens, args.kv_lens_type, "kv_lens_type");
  if (status != KDTREE_OK) return status;
  const int64_t page = args.page_size;
  if (page != 16 && page != 32 && page != 64 && page != 128 && page != 256) {
    return fail(KDTREE_UNSUPPORTED,
                "page_size: got %lld, expected 16, 32, 64, 128 or 256 with a page table; pass token slots by kv_indptr",
                static_cast<long long>(page));
  }
  if (args.num_slots % page != 0) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "num_slots: got %lld, expected a multiple of page_size %lld; pass the pool by whole pages",
                static_cast<long long>(args.num_slots), static_cast<long long>(page));
  }
  if (args.page_table_stride < args.num_kv_indices || args.page_table_stride > kMostInt / args.batch) {
    return fail(
        KDTREE_INVALID_ARGUMENT,
        "page_table_stride: got %lld, expected %lld (the columns) to %lld; make the page table's rows contiguous",
        static_cast<long long>(args.page_table_stride), static_cast<long long>(args.num_kv_indices),
        static_cast<long long>(kMostInt / args.batch));
  }
  return KDTREE_OK;
}

int check_visibility(const kdtree_verify_attn_paged_args& args) {
  int status = check_type("visibility_type", args.visibility_type, KDTREE_FULL_MASK,
                          "0 (causal), 1 (bytes), 2 (bits), 3 (parents), 4 (full mask)");
  if (status != KDTREE_OK || args.skip_draft) return status;
  const bool bytes = args.visibility_type == KDTREE_MASK_BYTES || args.visibility_type == KDTREE_FULL_MASK;
  if (args.visibility_type == KDTREE_CAUSAL) {
    status = check_absent("visibility", args.visibility, "where visibility_type is causal");
  } else {
    const size_t alignment = bytes ? 1 : args.visibility_type == KDTREE_MASK_BITS ? 8 : 4;
    status = check_pointer("visibility", args.visibility, alignment, bytes && args.mask_size == 0);
  }
  if (status != KDTREE_OK) return status;
  if (!bytes) status = check_absent("mask_indptr", args.mask_indptr, "where visibility is not a byte mask");
  if (status == KDTREE_OK) status = check_pointer("mask_indptr", args.mask_indptr, 8, true);
  if (status == KDTREE_OK && bytes) {
    status = check_range("mask_size", args.mask_size, 0, INT64_MAX, "pass the mask's length in bytes");
  }
  if (status == KDTREE_OK && args.visibility_type == KDTREE_MASK_BITS) {
    status = check_range("mask_stride", args.mask_stride, 1, 4, "pass one 64-bit word for every 64 nodes");
    if (status == KDTREE_OK && args.max_q_len > 64 * args.mask_stride) {
      status = fail(KDTREE_INVALID_ARGUMENT,
                    "mask_stride: got %lld words a row, expected at least %lld for max_q_len %lld; widen the rows",
                    static_cast<long long>(args.mask_stride), static_cast<long long>((args.max_q_len + 63) / 64),
                    static_cast<long long>(args.max_q_len));
    }
  }
  return status;
}

int check(const kdtree_verify_attn_paged_args* args) {
  int status = check_sizes(args);
  if (status == KDTREE_OK) status = check_sm_scale(args->sm_scale);
  if (status != KDTREE_OK) return status;
  if (!(args->logit_cap >= 0.0f) || std::isinf(args->logit_cap)) {
    return fail(KDTREE_INVALID_ARGUMENT, "logit_cap: got %g, expected a finite number >= 0; 0 is no cap",
                static_cast<double>(args->logit_cap));
  }
  const int64_t width = args->d_latent + args->d_rope;
  status = check_pointer("q", args->q, 16, false);
  // A single head, or a single row, may have any stride: it is not used to get to another.
  if (status == KDTREE_OK && args->num_heads > 1)
    status = check_row_stride("q_stride_head", args->q_stride_head, width);
  if (status == KDTREE_OK && args->total_q > 1)
    status = check_row_stride("q_stride_token", args->q_stride_token, width);
  if (status == KDTREE_OK) status = check_pointer("kv_pool", args->kv_pool, 16, false);
  if (status == KDTREE_OK) status = check_row_stride("kv_stride", args->kv_stride, width);
  if (status == KDTREE_OK) status = check_range("num_slots", args->num_slots, 1, kMostInt, "pass the pool's rows");
  if (status == KDTREE_OK) status = check_keys(*args);
  if (status == KDTREE_OK) status = check_indices("qo_indptr", args->qo_indptr, args->qo_indptr_type, "qo_indptr_type");
  if (status == KDTREE_OK && !args->skip_draft) {
    if (args->draft_kv != nullptr) {
      status = check_pointer("draft_kv", args->draft_kv, 16, false);
      if (status == KDTREE_OK) status = check_row_stride("draft_kv_stride", args->draft_kv_stride, width);
      if (status == KDTREE_OK) status = check_absent("draft_slots", args->draft_slots, "beside draft_kv");
    } else {
      status = check_indices("draft_slots", args->draft_slots, args->draft_slots_type, "draft_slots_type");
    }
  }
  if (status == KDTREE_OK) status = check_visibility(*args);
  if (status == KDTREE_OK) status = check_type("out_type", args->out_type, KDTREE_FLOAT32, "0 (bfloat16), 1 (float32)");
  if (status == KDTREE_OK) status = check_pointer("out", args->out, 16, false);
  if (status == KDTREE_OK) status = check_pointer("lse", args->lse, 4, false);
  return status;
}

int check(const kdtree_merge_partials_args* args) {
  int status = check_struct("kdtree_merge_partials_args", args);
  if (status == KDTREE_OK) status = check_range("num_parts", args->num_parts, 1, 1024, "merge in several calls");
  if (status == KDTREE_OK) status = check_range("num_rows", args->num_rows, 1, kMostInt, "merge in several calls");
  if (status == KDTREE_OK && args->d_latent != 256 && args->d_latent != 512) {
    status = fail(KDTREE_UNSUPPORTED, "d_latent: got %lld, expected 256 or 512; other widths have no kernel",
                  static_cast<long long>(args->d_latent));
  }
  if (status == KDTREE_OK) status = check_type("in_type", args->in_type, KDTREE_FLOAT32, "0 (bfloat16), 1 (float32)");
  if (status == KDTREE_OK) status = check_type("out_type", args->out_type, KDTREE_FLOAT32, "0 (bfloat16), 1 (float32)");
  if (status == KDTREE_OK) status = check_pointer("outs", args->outs, 16, false);
  if (status == KDTREE_OK) status = check_pointer("lses", args->lses, 4, false);
  if (status == KDTREE_OK) status = check_pointer("out", args->out, 16, false);
  if (status == KDTREE_OK) status = check_pointer("lse", args->lse, 4, true);
  return status;
}

constexpr int64_t kMostNodes = 1025;
const char* const kSplitBatch = "split the batch into several calls";
const char* const kIndexTypes = "0 (int32), 1 (int64)";

int alignment_of(int32_t index_type) { return index_type == KDTREE_INT64 ? 8 : 4; }

int check(const kdtree_tree_build_args* args) {
  int status = check_struct("kdtree_tree_build_args", args);
  if (status == KDTREE_OK) status = check_range("batch", args->batch, 1, 65535, kSplitBatch);
  if (status == KDTREE_OK) status = check_range("max_depth", args->max_depth, 0, 32, "draft fewer tokens ahead");
  if (status == KDTREE_OK) status = check_range("max_width", args->max_width, 1, 64, "keep fewer candidates a depth");
  if (status == KDTREE_OK) status = check_range("max_nodes", args->max_nodes, 1, kMostNodes, "draft smaller trees");
  if (status == KDTREE_OK) status = check_type("token_type", args->token_type, KDTREE_INT64, kIndexTypes);
  if (status == KDTREE_OK) status = check_type("index_type", args->index_type, KDTREE_INT64, kIndexTypes);
  if (status != KDTREE_OK) return status;
  const int token = alignment_of(args->token_type), index = alignment_of(args->index_type);
  status = check_pointer("log_probs", args->log_probs, 4, args->max_depth == 0);
  if (status == KDTREE_OK) status = check_pointer("token_ids", args->token_ids, token, args->max_depth == 0);
  if (status == KDTREE_OK) status = check_pointer("root_tokens", args->root_tokens, token, false);
  if (status == KDTREE_OK) status = check_pointer("budgets", args->budgets, 4, true);
  if (status == KDTREE_OK) status = check_pointer("num_depths", args->num_depths, 4, true);
  if (status == KDTREE_OK) status = check_pointer("widths", args->widths, 4, true);
  if (status == KDTREE_OK)
    status = check_indices("seq_lens", args->seq_lens, args->seq_lens_type, "seq_lens_type", true);
  if (status == KDTREE_OK) status = check_pointer("tokens", args->tokens, token, false);
  if (status == KDTREE_OK) status = check_pointer("parents", args->parents, 4, false);
  if (status == KDTREE_OK) status = check_pointer("depths", args->depths, 4, true);
  if (status == KDTREE_OK) status = check_pointer("positions", args->positions, index, true);
  if (status == KDTREE_OK) status = check_pointer("visibility", args->visibility, 1, true);
  if (status == KDTREE_OK) status = check_pointer("visibility_bits", args->visibility_bits, 8, true);
  if (status == KDTREE_OK) status = check_pointer("retrive_index", args->retrive_index, index, true);
  if (status == KDTREE_OK) status = check_pointer("retrive_next_token", args->retrive_next_token, index, true);
  if (status == KDTREE_OK) status = check_pointer("retrive_next_sibling", args->retrive_next_sibling, index, true);
  if (status == KDTREE_OK) status = check_pointer("num_nodes", args->num_nodes, 4, false);
  if (status == KDTREE_OK) status = check_pointer("status", args->status, 4, false);
  return status;
}

// Where each request's rows are: what tree_accept and kv_compact have in common.
template <class Args>
int check_layout(const Args& args) {
  int status = check_range("batch", args.batch, 1, 65535, kSplitBatch);
  if (status == KDTREE_OK) status = check_range("max_q_len", args.max_q_len, 1, kMostNodes, "draft smaller trees");
  if (status == KDTREE_OK) status = check_range("max_path", args.max_path, 1, kMostNodes, "draft shallower trees");
  if (status == KDTREE_OK) status = check_range("total_q", args.total_q, 1, kMostInt, kSplitBatch);
  if (status == KDTREE_OK)
    status = check_indices("qo_indptr", args.qo_indptr, args.qo_indptr_type, "qo_indptr_type", true);
  if (status != KDTREE_OK) return status;
  if (args.qo_indptr != nullptr) return check_absent("num_nodes", args.num_nodes, "beside qo_indptr");
  if (args.total_q != args.batch * args.max_q_len) {
    return fail(
        KDTREE_INVALID_ARGUMENT,
        "total_q: got %lld, expected batch * max_q_len = %lld without qo_indptr; pad the trees or pass qo_indptr",
        static_cast<long long>(args.total_q), static_cast<long long>(args.batch * args.max_q_len));
  }
  return check_pointer("num_nodes", args.num_nodes, 4, true);
}

int check_sizes(const kdtree_tree_accept_args* args) {
  int status = check_struct("kdtree_tree_accept_args", args);
  if (status == KDTREE_OK) status = check_range("total_q", args->total_q, 1, kMostInt, kSplitBatch);
  if (status == KDTREE_OK)
    status = check_type("target", args->target, KDTREE_TARGET_SAMPLE, "0 (tokens), 1 (argmax), 2 (sample)");
  if (status == KDTREE_OK && args->target != KDTREE_TARGET_TOKENS) {
    status = check_range("vocab_size", args->vocab_size, 1, kMostInt, "pass the width of logits");
  }
  return status;
}

int check_target(const kdtree_tree_accept_args& args) {
  if (args.target == KDTREE_TARGET_TOKENS) {
    return check_pointer("target_tokens", args.target_tokens, alignment_of(args.token_type), false);
  }
  int status = check_absent("target_tokens", args.target_tokens, "where the target is worked out from logits");
  if (status == KDTREE_OK)
    status = check_type("logits_type", args.logits_type, KDTREE_FLOAT32, "0 (bfloat16), 1 (float32)");
  if (status == KDTREE_OK) status = check_pointer("logits", args.logits, 16, false);
  if (status == KDTREE_OK) {
    status =
        check_range("logits_stride", args.logits_stride, args.vocab_size, kMostInt, "pass rows that do not overlap");
  }
  if (status != KDTREE_OK || args.target == KDTREE_TARGET_ARGMAX) return status;
  status = check_pointer("uniforms", args.uniforms, 4, false);
  if (status == KDTREE_OK && !(args.temperature > 0.0f && !std::isinf(args.temperature))) {
    status =
        fail(KDTREE_INVALID_ARGUMENT,
             "temperature: got %g, expected a finite number > 0; for the most probable token take target 1 (argmax)",
             static_cast<double>(args.temperature));
  }
  return status;
}

int check(const kdtree_tree_accept_args* args) {
  int status = check_sizes(args);
  if (status == KDTREE_OK) status = check_layout(*args);
  if (status == KDTREE_OK) status = check_type("token_type", args->token_type, KDTREE_INT64, kIndexTypes);
  if (status == KDTREE_OK) status = check_type("index_type", args->index_type, KDTREE_INT64, kIndexTypes);
  if (status != KDTREE_OK) return status;
  const int token = alignment_of(args->token_type), index = alignment_of(args->index_type);
  status = check_pointer("tokens", args->tokens, token, false);
  if (status == KDTREE_OK && args->parents != nullptr) {
    status = check_pointer("parents", args->parents, 4, false);
    if (status == KDTREE_OK) status = check_absent("retrive_next_token", args->retrive_next_token, "beside parents");
    if (status == KDTREE_OK) {
      status = check_absent("retrive_next_sibling", args->retrive_next_sibling, "beside parents");
    }
  } else if (status == KDTREE_OK) {
    if (args->retrive_next_token == nullptr && args->retrive_next_sibling == nullptr) {
      return fail(KDTREE_INVALID_ARGUMENT,
                  "parents: got a null pointer, expected parents, or retrive_next_token and retrive_next_sibling; pass "
                  "the tree");
    }
    status = check_pointer("retrive_next_token", args->retrive_next_token, index, false);
    if (status == KDTREE_OK) status = check_pointer("retrive_next_sibling", args->retrive_next_sibling, index, false);
  }
  if (status == KDTREE_OK) status = check_target(*args);
  if (status == KDTREE_OK) status = check_pointer("path", args->path, 4, false);
  if (status == KDTREE_OK) status = check_pointer("path_len", args->path_len, 4, false);
  if (status == KDTREE_OK) status = check_pointer("bonus", args->bonus, token, false);
  if (status == KDTREE_OK) status = check_pointer("node_targets", args->node_targets, token, true);
  if (status == KDTREE_OK) status = check_pointer("accept_index", args->accept_index, 4, true);
  if (status == KDTREE_OK) status = check_pointer("accept_token_num", args->accept_token_num, 4, true);
  if (status == KDTREE_OK) status = check_pointer("predicts", args->predicts, 4, true);
  if (status == KDTREE_OK) status = check_pointer("status", args->status, 4, false);
  return status;
}

// Where the rows of the nodes are: slots, or a page table.
int check_slots(const kdtree_kv_compact_args& args) {
  int status = check_type("slots_type", args.slots_type, KDTREE_INT64, kIndexTypes);
  if (status != KDTREE_OK) return status;
  const int slot = alignment_of(args.slots_type);
  if (args.node_slots != nullptr) {
    status = check_pointer("node_slots", args.node_slots, slot, false);
    if (status == KDTREE_OK) status = check_absent("page_table", args.page_table, "beside node_slots");
    if (status == KDTREE_OK) status = check_absent("kv_lens", args.kv_lens, "beside node_slots");
    return status;
  }
  if (args.page_table == nullptr) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "node_slots: got a null pointer, expected node_slots, or page_table with kv_lens; pass one of them");
  }
  status = check_pointer("page_table", args.page_table, slot, false);
  if (status == KDTREE_OK) status = check_indices("kv_lens", args.kv_lens, args.kv_lens_type, "kv_lens_type");
  if (status == KDTREE_OK) status = check_range("page_size", args.page_size, 1, 65536, "pass the tokens of a page");
  if (status == KDTREE_OK) {
    status = check_range("page_table_columns", args.page_table_columns, 1, kMostInt, "pass the pages of a request");
  }
  if (status == KDTREE_OK) {
    status = check_range("page_table_stride", args.page_table_stride, args.page_table_columns, kMostInt,
                         "pass rows that do not overlap");
  }
  return status;
}

int check(const kdtree_kv_compact_args* args) {
  int status = check_struct("kdtree_kv_compact_args", args);
  if (status == KDTREE_OK) status = check_layout(*args);
  if (status == KDTREE_OK) status = check_range("num_layers", args->num_layers, 1, 65535, "compact in several calls");
  if (status == KDTREE_OK) status = check_range("num_slots", args->num_slots, 1, kMostInt, "pass the pool's rows");
  if (status == KDTREE_OK) status = check_range("row_bytes", args->row_bytes, 1, 65536, "pass the bytes of a row");
  if (status == KDTREE_OK) {
    status = check_range("slot_stride", args->slot_stride, args->row_bytes, kMostInt, "pass rows that do not overlap");
  }
  if (status != KDTREE_OK) return status;
  if (args->pool == nullptr && args->layer_pools == nullptr) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "pool: got a null pointer, expected a pool, or layer_pools with one address a layer; pass one of them");
  }
  if (args->pool != nullptr) {
    status = check_pointer("pool", args->pool, 1, false);
    if (status == KDTREE_OK) status = check_absent("layer_pools", args->layer_pools, "beside pool");
    if (status == KDTREE_OK && args->num_layers > 1) {
      status = check_range("layer_stride", args->layer_stride, args->row_bytes, INT64_MAX / args->num_layers,
                           "pass layers that do not overlap");
    }
  } else {
    status = check_pointer("layer_pools", args->layer_pools, 8, false);
  }
  if (status == KDTREE_OK) status = check_slots(*args);
  if (status != KDTREE_OK) return status;
  const int slot = alignment_of(args->slots_type);
  status = check_pointer("path", args->path, 4, false);
  if (status == KDTREE_OK) status = check_pointer("path_len", args->path_len, 4, false);
  if (status == KDTREE_OK) status = check_pointer("committed_slots", args->committed_slots, slot, true);
  if (status == KDTREE_OK) status = check_pointer("free_slots", args->free_slots, slot, true);
  if (status == KDTREE_OK) status = check_pointer("num_free", args->num_free, 4, true);
  if (status == KDTREE_OK) status = check_pointer("status", args->status, 4, false);
  return status;
}

template <class Args>
int check_workspace(const char* op, const Args& args, int64_t bytes) {
  if (bytes == 0) return KDTREE_OK;
  if (args.workspace == nullptr || args.workspace_size < static_cast<size_t>(bytes)) {
    return fail(KDTREE_WORKSPACE_TOO_SMALL,
                "workspace: got %zu bytes, expected %lld; ask kdtree_%s_workspace_size and allocate that",
                args.workspace == nullptr ? 0 : args.workspace_size, static_cast<long long>(bytes), op);
  }
  return check_pointer("workspace", args.workspace, 16, false);
}

// Answers a size query: `bytes_of` the checked arguments.
template <class Args, class BytesOf>
int workspace_size(const Args* args, size_t* bytes, BytesOf bytes_of) {
  if (bytes == nullptr) {
    return fail(KDTREE_INVALID_ARGUMENT, "bytes: got a null pointer, expected a size_t; pass its address");
  }
  *bytes = 0;
  const int status = check_sizes(args);
  if (status == KDTREE_OK) *bytes = static_cast<size_t>(bytes_of(*args));
  return status;
}

int launched(const char* kernel, int failed) {
  if (failed == 0) return KDTREE_OK;
  return fail(KDTREE_LAUNCH_FAILED, "%s: %s", kernel, launch_error());
}

const kdtree_kernel_info kKernels[] = {
    {"verify_attn", "verify_attn", "float32", "dense", kGeometries, "sm_80+", 1, verify_attn_shared_bytes()},
    {"verify_attn_flash", "verify_attn", "float32", "dense", kGeometries, "sm_80+", 1,
     verify_attn_flash_shared_bytes()},
    {"verify_attn_flash_paged", "verify_attn_paged", "bfloat16", "paged", kGeometries, "sm_80+", 2,
     verify_attn_flash_paged_shared_bytes()},
    {"merge_partials", "merge_partials", "bfloat16", "dense", kGeometries, "sm_80+", 2, merge_partials_shared_bytes()},
    {"tree_build", "tree_build", "float32", "dense", "", "sm_80+", 2, tree_build_shared_bytes()},
    {"tree_accept", "tree_accept", "bfloat16", "dense", "", "sm_80+", 2, tree_accept_shared_bytes()},
    {"kv_compact", "kv_compact", "any", "paged", "", "sm_80+", 2, kv_compact_shared_bytes()},
};
constexpr int kNumKernels = sizeof(kKernels) / sizeof(kKernels[0]);

}  // namespace
}  // namespace kdtree

extern "C" {

int kdtree_abi_version(void) { return KDTREE_ABI_VERSION; }

const char* kdtree_last_error(void) { return kdtree::last_error.c_str(); }

const char* kdtree_build_place(void) { return KDTREE_HOST_BUILD ? "host" : "cuda"; }

const char* kdtree_build_archs(void) { return KDTREE_BUILD_ARCHS; }

int kdtree_num_kernels(void) { return kdtree::kNumKernels; }

const kdtree_kernel_info* kdtree_kernel_at(int index) {
  return index >= 0 && index < kdtree::kNumKernels ? &kdtree::kKernels[index] : nullptr;
}

int kdtree_verify_attn_workspace_size(const kdtree_verify_attn_args* args, size_t* bytes) {
  return kdtree::workspace_size(
      args, bytes, [](const auto& sizes) { return kdtree::verify_attn_flash_plan(sizes).workspace_bytes; });
}

int kdtree_verify_attn_paged_workspace_size(const kdtree_verify_attn_paged_args* args, size_t* bytes) {
  return kdtree::workspace_size(args, bytes, kdtree::verify_attn_paged_workspace_bytes);
}

int kdtree_verify_attn(const kdtree_verify_attn_args* args, void* stream) {
  const int status = kdtree::check(args);
  if (status != KDTREE_OK) return status;
  return kdtree::launched("verify_attn", kdtree::launch_verify_attn(*args, stream));
}

int kdtree_verify_attn_flash(const kdtree_verify_attn_args* args, void* stream) {
  int status = kdtree::check(args);
  if (status == KDTREE_OK) {
    status = kdtree::check_workspace("verify_attn", *args, kdtree::verify_attn_flash_plan(*args).workspace_bytes);
  }
  if (status != KDTREE_OK) return status;
  return kdtree::launched("verify_attn_flash", kdtree::launch_verify_attn_flash(*args, stream));
}

int kdtree_verify_attn_flash_paged(const kdtree_verify_attn_paged_args* args, void* stream) {
  int status = kdtree::check(args);
  if (status == KDTREE_OK) {
    status = kdtree::check_workspace("verify_attn_paged", *args, kdtree::verify_attn_paged_workspace_bytes(*args));
  }
  if (status != KDTREE_OK) return status;
  return kdtree::launched("verify_attn_flash_paged", kdtree::launch_verify_attn_flash_paged(*args, stream));
}

int kdtree_merge_partials(const kdtree_merge_partials_args* args, void* stream) {
  const int status = kdtree::check(args);
  if (status != KDTREE_OK) return status;
  return kdtree::launched("merge_partials", kdtree::launch_merge_partials(*args, stream));
}

int kdtree_tree_build(const kdtree_tree_build_args* args, void* stream) {
  const int status = kdtree::check(args);
  if (status != KDTREE_OK) return status;
  return kdtree::launched("tree_build", kdtree::launch_tree_build(*args, stream));
}

int kdtree_tree_accept_workspace_size(const kdtree_tree_accept_args* args, size_t* bytes) {
  return kdtree::workspace_size(args, bytes, kdtree::tree_accept_workspace_bytes);
}

int kdtree_tree_accept(const kdtree_tree_accept_args* args, void* stream) {
  int status = kdtree::check(args);
  if (status == KDTREE_OK) {
    status = kdtree::check_workspace("tree_accept", *args, kdtree::tree_accept_workspace_bytes(*args));
  }
  if (status != KDTREE_OK) return status;
  return kdtree::launched("tree_accept", kdtree::launch_tree_accept(*args, stream));
}

int kdtree_kv_compact(const kdtree_kv_compact_args* args, void* stream) {
  const int status = kdtree::check(args);
  if (status != KDTREE_OK) return status;
  return kdtree::launched("kv_compact", kdtree::launch_kv_compact(*args, stream));
}

}  // extern "C"
