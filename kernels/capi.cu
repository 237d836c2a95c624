// The C interface: the kernel table, the checks of every argument, the last error. No arithmetic on tensors.

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "kdtree/capi.h"
#include "verify_attn/verify_attn.cuh"

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

const char* const kDenseGeometries = "512/64 512/0 256/64 256/32";

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

// What a size query and a launch both need: a struct of this ABI and sizes within the limits.
int check_sizes(const kdtree_verify_attn_args* args) {
  if (args == nullptr) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "args: got a null pointer, expected a kdtree_verify_attn_args; pass its address");
  }
  if (args->struct_size != sizeof(kdtree_verify_attn_args)) {
    return fail(
        KDTREE_ABI_MISMATCH,
        "struct_size: got %zu, expected %zu (ABI version %d); rebuild the caller with this library's kdtree/capi.h",
        args->struct_size, sizeof(kdtree_verify_attn_args), KDTREE_ABI_VERSION);
  }
  int status = check_range("batch", args->batch, 1, 65535, "split the batch into several calls");
  if (status == KDTREE_OK) status = check_range("q_len", args->q_len, 1, 256, "draft a smaller tree");
  if (status == KDTREE_OK)
    status = check_range("num_heads", args->num_heads, 1, 128, "split the heads into several calls");
  if (status == KDTREE_OK) status = check_range("kv_len", args->kv_len, 1, 262144, "shorten the context");
  if (status != KDTREE_OK) return status;
  const bool known = (args->d_latent == 512 && (args->d_rope == 64 || args->d_rope == 0)) ||
                     (args->d_latent == 256 && (args->d_rope == 64 || args->d_rope == 32));
  if (!known) {
    return fail(KDTREE_UNSUPPORTED,
                "d_latent/d_rope: got %lld/%lld, expected one of %s; other geometries have no kernel",
                static_cast<long long>(args->d_latent), static_cast<long long>(args->d_rope), kDenseGeometries);
  }
  if (args->split_tokens < 0 || args->split_tokens % kVerifyAttnKeyTile != 0) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "split_tokens: got %lld, expected 0 or a positive multiple of %d; 0 lets the library choose",
                static_cast<long long>(args->split_tokens), kVerifyAttnKeyTile);
  }
  return KDTREE_OK;
}

int check(const kdtree_verify_attn_args* args) {
  int status = check_sizes(args);
  if (status != KDTREE_OK) return status;
  if (!(args->sm_scale > 0.0f) || std::isinf(args->sm_scale)) {
    return fail(KDTREE_INVALID_ARGUMENT,
                "sm_scale: got %g, expected a finite number > 0; pass the model's softmax scale, yarn factor included",
                static_cast<double>(args->sm_scale));
  }
  status = check_pointer("q", args->q, 16, false);
  if (status == KDTREE_OK) status = check_pointer("kv", args->kv, 16, false);
  if (status == KDTREE_OK) status = check_pointer("mask", args->mask, 1, true);
  if (status == KDTREE_OK) status = check_pointer("kv_lens", args->kv_lens, 4, true);
  if (status == KDTREE_OK) status = check_pointer("out", args->out, 16, false);
  if (status == KDTREE_OK) status = check_pointer("lse", args->lse, 4, false);
  return status;
}

int check_workspace(const kdtree_verify_attn_args& args, int64_t bytes) {
  if (bytes == 0) return KDTREE_OK;
  if (args.workspace == nullptr || args.workspace_size < static_cast<size_t>(bytes)) {
    return fail(KDTREE_WORKSPACE_TOO_SMALL,
                "workspace: got %zu bytes, expected %lld; ask kdtree_verify_attn_workspace_size and allocate that",
                args.workspace == nullptr ? 0 : args.workspace_size, static_cast<long long>(bytes));
  }
  return check_pointer("workspace", args.workspace, 16, false);
}

int launched(const char* kernel, int failed) {
  if (failed == 0) return KDTREE_OK;
  return fail(KDTREE_LAUNCH_FAILED, "%s: %s", kernel, launch_error());
}

const kdtree_kernel_info kKernels[] = {
    {"verify_attn", "verify_attn", "float32", "dense", kDenseGeometries, "sm_80+", 1, verify_attn_shared_bytes()},
    {"verify_attn_flash", "verify_attn", "float32", "dense", kDenseGeometries, "sm_80+", 1,
     verify_attn_flash_shared_bytes()},
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
  if (bytes == nullptr) {
    return kdtree::fail(KDTREE_INVALID_ARGUMENT, "bytes: got a null pointer, expected a size_t; pass its address");
  }
  *bytes = 0;
  const int status = kdtree::check_sizes(args);
  if (status == KDTREE_OK) *bytes = static_cast<size_t>(kdtree::verify_attn_flash_plan(*args).workspace_bytes);
  return status;
}

int kdtree_verify_attn(const kdtree_verify_attn_args* args, void* stream) {
  const int status = kdtree::check(args);
  if (status != KDTREE_OK) return status;
  return kdtree::launched("verify_attn", kdtree::launch_verify_attn(*args, stream));
}

int kdtree_verify_attn_flash(const kdtree_verify_attn_args* args, void* stream) {
  int status = kdtree::check(args);
  if (status == KDTREE_OK) {
    status = kdtree::check_workspace(*args, kdtree::verify_attn_flash_plan(*args).workspace_bytes);
  }
  if (status != KDTREE_OK) return status;
  return kdtree::launched("verify_attn_flash", kdtree::launch_verify_attn_flash(*args, stream));
}

}  // extern "C"
