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
 * Tensors are dense and row-major. Shapes use: batch = requests, q_len = tree nodes a request (root included),
 * num_heads = query heads, kv_len = keys a request, d_latent = width of the latent part (it is also the value),
 * d_rope = width of the rotary part. A kv row is [latent | rope].
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
#define KDTREE_ABI_VERSION 1

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
  const char* dtype;      /* of q and kv: "float32" */
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

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KDTREE_CAPI_H_ */
