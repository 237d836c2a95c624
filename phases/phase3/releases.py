"""What releases of SGLang differ in, as far as a verify step without a server needs it: 0.5.12, 0.5.16 and 0.5.23."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from sglang.srt.layers.attention import triton_backend

try:
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
except ImportError:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
try:
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.runtime_context import publish as _publish
except ImportError:  # before 0.5.23
    KVIndexTranslator = None
try:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
except ImportError:  # before 0.5.16: the batch knows its backend
    forward_context = None

__all__ = ["TokenToKVPoolAllocator", "batch_facts", "bind", "complete_runner", "context", "publish"]


@functools.cache
def _one_rank() -> Any:
    """One rank of everything, as SGLang's context says it; entered once and for all."""
    if hasattr(triton_backend, "get_attention_tp_size"):  # 0.5.12
        triton_backend.get_attention_tp_size = lambda: 1
        return None
    from sglang.srt.runtime_context import get_parallel

    entered = get_parallel().override(
        tp_size=1, attn_tp_size=1, attn_dcp_size=1, dcp_size=1, dcp_rank=0, attn_dcp_rank=0
    )
    entered.__enter__()
    return entered


def publish(arguments: Any) -> None:
    """Makes these the arguments of the process."""
    if KVIndexTranslator is not None:
        _publish(arguments, role="scheduler")
        return
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(arguments)
    _one_rank()


def complete_runner(runner: Any, nodes: int) -> None:
    """What later releases read of a model runner."""
    if KVIndexTranslator is None:
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner.spec_algorithm = SpeculativeAlgorithm.EAGLE
    runner.decode_num_tokens_per_req = lambda **_: nodes
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        token_to_kv_pool=runner.token_to_kv_pool,
        page_size=1,
        device=runner.device,
        is_draft_worker=False,
    )


def batch_facts(runner: Any, backend: Any) -> dict[str, Any]:
    """What a batch itself holds in early releases."""
    if forward_context is not None:
        return {}
    return {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool": runner.token_to_kv_pool,
        "attn_backend": backend,
    }


def bind(runner: Any, batch: Any) -> None:
    """Before the metadata of a batch is made."""
    if KVIndexTranslator is not None:
        runner.kv_index_translator.bind_own_plan(batch)


def context(backend: Any) -> contextlib.AbstractContextManager[Any]:
    """In which a layer finds its backend."""
    if forward_context is None:
        return contextlib.nullcontext()
    entered: contextlib.AbstractContextManager[Any] = forward_context(ForwardContext(attn_backend=backend))
    return entered
