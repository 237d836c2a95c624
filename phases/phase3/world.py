"""A verify step of SGLang's own parts: pools, allocator, batch, tree mask, layer. Only the model runner is ours."""

from __future__ import annotations

import json
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from kdtree_engine.sglang_backend.backend import KDTreeMLAVerifyBackend
from oracle.verify_attn import verify_attn
from phases.phase3 import releases

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]

LATENT, ROPE = 512, 64
SCALE = 192**-0.5


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


@dataclass(frozen=True)
class Step:
    """A verify step.

    tree: "tree", with the mask that SGLang's tree builder makes; "chain", without one.
    layers: of the model; all of them get the same values.
    """

    prefixes: tuple[int, ...]
    nodes: int = 8
    heads: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    tree: str = "tree"
    seed: int = 0
    layers: int = 1

    def __str__(self) -> str:
        kv = f"-kv_{self.kv_dtype}" if self.kv_dtype else ""
        return f"{'+'.join(map(str, self.prefixes))}x{self.nodes}-h{self.heads}-{self.dtype}{kv}-{self.tree}"


def device(place: Place) -> str:
    """The device's name in torch."""
    return "cuda" if place.kind == "cuda" else "cpu"


class World:
    """The parts of a step for one backend class."""

    @classmethod
    def ours(cls, step: Step, device: str, **changes: Any) -> World:
        """With our backend."""
        return cls(KDTreeMLAVerifyBackend, step, device, **changes)

    @classmethod
    def theirs(cls, step: Step, device: str, **changes: Any) -> World:
        """With SGLang's."""
        return cls(TritonAttnBackend, step, device, **changes)

    @classmethod
    def both(cls, step: Step, device: str, **changes: Any) -> tuple[World, World]:
        """Ours, and theirs with the same values."""
        return cls.ours(step, device, **changes), cls.theirs(step, device, **changes)

    def __init__(self, backend: Any, step: Step, device: str, *, deterministic: bool = False, **config: Any) -> None:
        self.step, self.device = step, device
        longest = max(step.prefixes) + step.nodes
        config = {"num_hidden_layers": step.layers, "max_position_embeddings": max(4096, longest)} | config
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
        releases.publish(arguments)
        self.slots = max(2048, len(step.prefixes) * longest)
        context = max(1024, longest)
        kv_dtype = getattr(torch, step.kv_dtype or step.dtype)
        self.requests = ReqToTokenPool(size=8, max_context_len=context, device=device, enable_memory_saver=False)
        self.pool = MLATokenToKVPool(
            size=self.slots,
            page_size=1,
            dtype=kv_dtype,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            layer_num=step.layers,
            device=device,
            enable_memory_saver=False,
        )
        self.allocator = releases.TokenToKVPoolAllocator(self.slots, kv_dtype, device, self.pool, need_sort=False)
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
        releases.complete_runner(self.runner, step.nodes)
        self.backend = backend(self.runner)
        self.layers = [
            RadixAttention(
                num_heads=step.heads,
                head_dim=LATENT + ROPE,
                scaling=SCALE,
                num_kv_heads=1,
                layer_id=layer_id,
                v_head_dim=LATENT,
            )
            for layer_id in range(step.layers)
        ]
        self.mask_buffer: torch.Tensor | None = None
        self._fill(kv_dtype)

    def _fill(self, kv_dtype: torch.dtype) -> None:
        """Prefixes in scattered slots, slots for the drafts, trees, and what the model would hand over."""
        step, device = self.step, self.device
        generator = torch.Generator().manual_seed(step.seed)
        rng = np.random.default_rng(step.seed)
        batch, nodes = len(step.prefixes), step.nodes
        self.allocator.free_pages = self.allocator.free_pages[
            torch.randperm(self.slots, generator=generator).to(device)
        ]
        self.rows = torch.tensor(rng.permutation(8)[:batch], dtype=torch.int64, device=device)
        dtype = getattr(torch, step.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        drafts = []
        for row, prefix in zip(self.rows.tolist(), step.prefixes, strict=True):
            if prefix:
                slots = self.allocator.alloc(prefix)
                self.requests.write((row, slice(0, prefix)), slots.to(torch.int32))
                rows = normal(prefix, 1, LATENT + ROPE).to(kv_dtype)
                for buffer in self.pool.kv_buffer:
                    buffer[slots] = rows
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
        if self.mask_buffer is not None:
            # As SGLang's tree builder fills a mask that the backend owns.
            mask = self.mask_buffer
            cells = torch.from_numpy(self.visible.reshape(-1)).to(mask)
            mask.fill_(1)
            mask[: len(cells)] = cells
        elif step.tree != "chain":
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
            **releases.batch_facts(self.runner, self.backend),
        )

    def pad(self, rows: int) -> None:
        """Adds rows that belong to no request, full of NaN; their drafts go to slot 0, as SGLang has it."""
        for name in ("q", "k"):
            tensor = getattr(self, name)
            more = torch.full((rows, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype, device=tensor.device)
            setattr(self, name, torch.cat([tensor, more]))
        self.out_cache_loc = torch.cat([self.out_cache_loc, self.out_cache_loc.new_zeros(rows)])

    def settled(self) -> None:
        """Lets the backend read what its steps found."""
        for _ in range(2):
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.backend._collect()

    def idle(self) -> torch.Tensor:
        """A verify step of a rank that has no request."""
        batch = self.batch()
        for name in ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "positions"):
            setattr(batch, name, getattr(batch, name)[:0])
        batch.batch_size = batch.seq_lens_sum = 0
        with releases.context(self.backend):
            releases.bind(self.runner, batch)
            self.backend.init_forward_metadata(batch)
            return self.layers[0](self.q[:0], self.k[:0], self.k[:0, :, :LATENT], batch)

    def forward(self, lengths: Sequence[int] = ()) -> torch.Tensor:
        """The layer's output [T, H * 512] in a fresh step; of a chain, the first nodes of each request by `lengths`."""
        with releases.context(self.backend):
            batch = self.batch()
            releases.bind(self.runner, batch)
            self.backend.init_forward_metadata(batch)
            if lengths:
                indptr = self.backend.forward_metadata.qo_indptr
                indptr[1:] = torch.tensor(lengths, device=self.device).cumsum(0)
            return self.attend(batch)

    def attend(self, batch: ForwardBatch) -> torch.Tensor:
        """The last layer's output, after all of them; their metadata is made, and their backend is found."""
        outs = [layer(self.q, self.k, self.k[..., :LATENT], batch) for layer in self.layers]
        return outs[-1]

    def answer(self, lengths: Sequence[int] = ()) -> Array:
        """What float64 gives, [T, H, 512], from the pool's rows of the prefix and the drafts as handed over."""
        step = self.step
        cache = self.pool.kv_buffer[0].double().cpu().numpy()[:, 0]
        table = self.requests.req_to_token.cpu().numpy()
        lengths = lengths or [step.nodes] * len(step.prefixes)
        ends = np.cumsum(lengths)
        q = self.q.double().cpu().numpy().reshape(-1, step.heads, LATENT + ROPE)
        k = self.k.double().cpu().numpy()[:, 0]
        outs = []
        for b, (row, prefix) in enumerate(zip(self.rows.tolist(), step.prefixes, strict=True)):
            n = lengths[b]
            rows = slice(ends[b] - n, ends[b])
            kv = np.concatenate([cache[table[row, :prefix]], k[rows]])
            mask = np.concatenate([np.ones((n, prefix), np.uint8), self.visible[b, :n, :n]], axis=1)
            out, _ = verify_attn(q[rows][None], kv[None], sm_scale=SCALE, mask=mask[None], d_latent=LATENT)
            outs.append(out[0])
        return np.concatenate(outs)
