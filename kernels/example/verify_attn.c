/* The smallest caller of the C interface, plain C99 on the host library:
 *
 *     cc -std=c99 -Ikernels/include kernels/example/verify_attn.c -Lbuild/cmake -lkdtree_host -lm -o verify_attn
 *     LD_LIBRARY_PATH=build/cmake ./verify_attn [KERNEL]
 *
 * All scores are 0, so each of a node's visible keys has the same weight: with key j holding j + 1 in every latent
 * element, node i, which sees keys 0 to i, must get the mean (i + 2) / 2 and an LSE of log(i + 1).
 */
#include <kdtree/capi.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 1, Q_LEN = 5, NUM_HEADS = 2, KV_LEN = 5, D_LATENT = 512, D_ROPE = 64, D_QK = D_LATENT + D_ROPE };

/* A 16-byte aligned block of zeros; C99 has no aligned_alloc, and malloc aligns to 16 where pointers have 64 bits. */
static void* zeros(size_t bytes) {
  void* block = calloc(bytes, 1);
  if (block == NULL) exit(2);
  return block;
}

static int check(const char* what, int i, int h, double actual, double expected) {
  if (fabs(actual - expected) <= 1e-5 * fabs(expected) + 1e-6) return 0;
  printf("%s[0, %d, %d]: got %.9g, expected %.9g\n", what, i, h, actual, expected);
  return 1;
}

int main(int argc, char** argv) {
  const char* kernel = argc > 1 ? argv[1] : "verify_attn_flash";
  int (*run)(const kdtree_verify_attn_args*, void*) =
      strcmp(kernel, "verify_attn") == 0 ? kdtree_verify_attn : kdtree_verify_attn_flash;
  kdtree_verify_attn_args args;
  float *q, *kv, *out, *lse;
  uint8_t* mask;
  int i, j, h, d, wrong = 0;

  if (kdtree_abi_version() != KDTREE_ABI_VERSION) {
    printf("ABI version: the library has %d, this program was compiled for %d; rebuild it\n", kdtree_abi_version(),
           KDTREE_ABI_VERSION);
    return 1;
  }

  q = zeros(sizeof(float) * BATCH * Q_LEN * NUM_HEADS * D_QK);
  kv = zeros(sizeof(float) * BATCH * KV_LEN * D_QK);
  mask = zeros(sizeof(uint8_t) * BATCH * Q_LEN * KV_LEN);
  out = zeros(sizeof(float) * BATCH * Q_LEN * NUM_HEADS * D_LATENT);
  lse = zeros(sizeof(float) * BATCH * Q_LEN * NUM_HEADS);
  for (j = 0; j < KV_LEN; ++j) {
    for (d = 0; d < D_QK; ++d) kv[j * D_QK + d] = (float)(j + 1);
  }
  for (i = 0; i < Q_LEN; ++i) {
    for (j = 0; j <= i; ++j) mask[i * KV_LEN + j] = 1;
  }

  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.q = q;
  args.kv = kv;
  args.mask = mask;
  args.out = out;
  args.lse = lse;
  args.batch = BATCH;
  args.q_len = Q_LEN;
  args.num_heads = NUM_HEADS;
  args.kv_len = KV_LEN;
  args.d_latent = D_LATENT;
  args.d_rope = D_ROPE;
  args.sm_scale = 0.0722f;

  if (kdtree_verify_attn_workspace_size(&args, &args.workspace_size) != KDTREE_OK) {
    printf("%s\n", kdtree_last_error());
    return 1;
  }
  if (args.workspace_size > 0) args.workspace = zeros(args.workspace_size);
  if (run(&args, NULL) != KDTREE_OK) {
    printf("%s\n", kdtree_last_error());
    return 1;
  }

  for (i = 0; i < Q_LEN; ++i) {
    for (h = 0; h < NUM_HEADS; ++h) {
      for (d = 0; d < D_LATENT; ++d) {
        wrong += check("out", i, h, out[(i * NUM_HEADS + h) * D_LATENT + d], (i + 2) / 2.0);
      }
      wrong += check("lse", i, h, lse[i * NUM_HEADS + h], log(i + 1.0));
    }
  }

  /* What a caller compiled against another version of the struct would meet. */
  args.struct_size -= 8;
  if (run(&args, NULL) != KDTREE_ABI_MISMATCH || strncmp(kdtree_last_error(), "struct_size: ", 13) != 0) {
    printf("a struct of another ABI was not refused: %s\n", kdtree_last_error());
    ++wrong;
  }

  if (wrong == 0) printf("%s on %s: right\n", kernel, kdtree_build_place());
  free(args.workspace);
  free(lse);
  free(out);
  free(mask);
  free(kv);
  free(q);
  return wrong == 0 ? 0 : 1;
}
