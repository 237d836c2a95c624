"""A verify step of SGLang's own parts: pools, allocator, batch, tree mask, layer. Only the model runner is ours."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.eagle_info import EagleVerifyInput

try:
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
except ImportError:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from oracle.verify_attn import verify_attn

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array = npt.NDArray[Any]

LATENT, ROPE = 512, 64
SCALE = 192**-0.5
SLOTS = 2048


def model_folder(heads: int, **changes: Any) -> str:
    """A folder with the config of a small DeepSeek V3."""
    folder = tempfile.mkdtemp()
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": LATENT,
        "q_lora_rank": 256,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        **changes,
    }
    Path(folder, "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def _parallel() -> Any:
    """One rank of everything, as SGLang's context says it; entered once and for all."""
    context = get_parallel().override(
        tp_size=1, attn_tp_size=1, attn_dcp_size=1, dcp_size=1, dcp_rank=0, attn_dcp_rank=0
    )
    context.__enter__()
    return context


@dataclass(frozen=True)
class Step:
    """A verify step.

    tree: "tree", with the mask that SGLang's tree builder makes; "chain", without one.
    """

    prefixes: tuple[int, ...]
    nodes: int = 8
    heads: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    tree: str = "tree"
    seed: int = 0

    def __str__(self) -> str:
        kv = f"-kv_{self.kv_dtype}" if self.kv_dtype else ""
        return f"{'+'.join(map(str, self.prefixes))}x{self.nodes}-h{self.heads}-{self.dtype}{kv}-{self.tree}"


class World:
    """The parts of a step for one backend class."""

    def __init__(self, backend: Any, step: Step, device: str, *, deterministic: bool = False, **config: Any) -> None:
        _parallel()
        self.step, self.device = step, device
        arguments = ServerArgs(
            model_path=model_folder(step.heads, **config),
            device=device,
            attention_backend="triton",
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_deterministic_inference=deterministic,
        )
        arguments.speculative_num_draft_tokens = step.nodes
        arguments.speculative_num_steps, arguments.speculative_eagle_topk = 4, 4
        set_global_server_args_for_scheduler(arguments)
        kv_dtype = getattr(torch, step.kv_dtype or step.dtype)
        self.requests = ReqToTokenPool(size=8, max_context_len=1024, device=device, enable_memory_saver=False)
        self.pool = MLATokenToKVPool(
            size=SLOTS,
            page_size=1,
            dtype=kv_dtype,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            layer_num=1,
            device=device,
            enable_memory_saver=False,
        )
        self.allocator = TokenToKVPoolAllocator(SLOTS, kv_dtype, device, self.pool, need_sort=False)
        self.runner = types.SimpleNamespace(
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            sliding_window_size=None,
            server_args=arguments,
            model_config=ModelConfig.from_server_args(arguments),
            hybrid_gdn_config=None,
            kimi_linear_config=None,
            linear_attn_model_spec=None,
            device=device,
            gpu_id=0,
            page_size=1,
            is_draft_worker=False,
            kv_cache_dtype=kv_dtype,
        )
        self.backend = backend(self.runner)
        self.layer = RadixAttention(
            num_heads=step.heads,
            head_dim=LATENT + ROPE,
            scaling=SCALE,
            num_kv_heads=1,
            layer_id=0,
            v_head_dim=LATENT,
        )
        self._fill()

    def _fill(self) -> None:
        """Prefixes in scattered slots, slots for the drafts, trees, and what the model would hand over."""
        step, device = self.step, self.device
        generator = torch.Generator().manual_seed(step.seed)
        rng = np.random.default_rng(step.seed)
        batch, nodes = len(step.prefixes), step.nodes
        self.allocator.free_pages = self.allocator.free_pages[torch.randperm(SLOTS, generator=generator).to(device)]
        self.rows = torch.tensor(rng.permutation(8)[:batch], dtype=torch.int64, device=device)
        dtype = getattr(torch, step.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        drafts = []
        for row, prefix in zip(self.rows.tolist(), step.prefixes, strict=True):
            if prefix:
                slots = self.allocator.alloc(prefix)
                self.requests.write((row, slice(0, prefix)), slots.to(torch.int32))
                self.pool.kv_buffer[0][slots] = normal(prefix, 1, LATENT + ROPE).to(self.pool.kv_buffer[0].dtype)
            drafts.append(self.allocator.alloc(nodes))
            self.requests.write((row, slice(prefix, prefix + nodes)), drafts[-1].to(torch.int32))
        self.out_cache_loc = torch.cat(drafts)
        self.visible = np.zeros((batch, nodes, nodes), np.uint8)
        for b, node in np.ndindex(batch, nodes):
            self.visible[b, node, node] = 1
            if node:
                parent = node - 1 if step.tree == "chain" else int(rng.integers(node))
                self.visible[b, node] |= self.visible[b, parent]
        self.positions = torch.tensor(
            [
                prefix + int(self.visible[b, node].sum()) - 1
                for b, prefix in enumerate(step.prefixes)
                for node in range(nodes)
            ],
            device=device,
        )
        self.q = normal(batch * nodes, step.heads * (LATENT + ROPE))
        self.k = normal(batch * nodes, 1, LATENT + ROPE)

    def batch(self) -> ForwardBatch:
        """The step as the scheduler makes it."""
        step, nodes = self.step, self.step.nodes
        lengths = torch.tensor(step.prefixes, dtype=torch.int64, device=self.device)
        ids = torch.zeros(len(step.prefixes) * nodes, dtype=torch.int64, device=self.device)
        mask = None
        if step.tree != "chain":
            full = [
                np.concatenate([np.ones((nodes, prefix), bool), self.visible[b].astype(bool)], axis=1).reshape(-1)
                for b, prefix in enumerate(step.prefixes)
            ]
            mask = torch.from_numpy(np.concatenate(full)).to(self.device)
        none = torch.full((len(step.prefixes), nodes), -1, dtype=torch.int64, device=self.device)
        spec = EagleVerifyInput(
            draft_token=ids,
            custom_mask=mask,
            positions=self.positions,
            retrieve_index=none,
            retrieve_next_token=none,
            retrieve_next_sibling=none,
            retrieve_cum_len=None,
            spec_steps=4,
            topk=4,
            draft_token_num=nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=sum(step.prefixes),
            seq_lens_cpu=lengths.cpu(),
        )
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(step.prefixes),
            input_ids=ids,
            req_pool_indices=self.rows,
            seq_lens=lengths,
            out_cache_loc=self.out_cache_loc,
            seq_lens_sum=sum(step.prefixes),
            seq_lens_cpu=lengths.cpu(),
            positions=self.positions,
            spec_info=spec,
        )

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with forward_context(ForwardContext(attn_backend=self.backend)):
            yield

    def forward(self) -> torch.Tensor:
        """The layer's output [T, H * 512] in a fresh step."""
        with self.context():
            batch = self.batch()
            self.backend.init_forward_metadata(batch)
            return self.layer(self.q, self.k, self.k[..., :LATENT], batch)

    def answer(self) -> Array:
        """What float64 gives, [T, H, 512], from the pool's rows of the prefix and the drafts as handed over."""
        step = self.step
        cache = self.pool.kv_buffer[0].double().cpu().numpy()[:, 0]
        table = self.requests.req_to_token.cpu().numpy()
        q = self.q.double().cpu().numpy().reshape(len(step.prefixes), step.nodes, step.heads, -1)
        k = self.k.double().cpu().numpy().reshape(len(step.prefixes), step.nodes, -1)
        outs = []
        for b, (row, prefix) in enumerate(zip(self.rows.tolist(), step.prefixes, strict=True)):
            kv = np.concatenate([cache[table[row, :prefix]], k[b]])
            mask = np.concatenate([np.ones((step.nodes, prefix), np.uint8), self.visible[b]], axis=1)
            out, _ = verify_attn(q[b][None], kv[None], sm_scale=SCALE, mask=mask[None], d_latent=LATENT)
            outs.append(out[0])
        return np.concatenate(outs)
