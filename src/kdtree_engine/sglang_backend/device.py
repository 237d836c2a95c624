"""What the backend does on the device between the two attention kernels and the host: judge, choose, keep.

Written for Triton, which every SGLang has: the judge of our kernels is not made of our kernels. None of these reads the
device from the host, so all of them stand in CUDA graphs; when a step has nothing for them, their programs end at once.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

# Columns of `found`, one row a layer: comparisons, sum of squared differences, sum of squares of the incumbent, worst
# row relative L2, worst difference of an element.
FOUND = 5
# Words of a latch's `state`: layer + 1 that is wanted, or 0; whether a breach is; what was kept, layer + 1 if it was
# wanted, -(layer + 1) of a breach, or 0; programs that are done; nodes, keys, requests and form of the mask of the step
# that was kept.
WANTED, WATCH, KEPT, DONE, NODES, KEYS, BATCH, FORM, WORDS = range(9)
MAX_BATCH = 1024
_PROGRAMS = 256
_BLOCK = 1024


@triton.jit
def _settle(
    ours,
    theirs,
    qo_indptr,
    switches,
    found,
    batch,
    heads,
    CHOOSES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    ours_ran = tl.load(switches)
    theirs_ran = tl.load(switches + 1)
    ours_used = tl.load(switches + 2)
    both = (ours_ran != 0) & (theirs_ran != 0)
    takes = (ours_used == 0) & (CHOOSES != 0)
    token = tl.program_id(0).to(tl.int64)
    if (both | takes) & (token < tl.load(qo_indptr + batch)):
        columns = tl.arange(0, WIDTH)
        squares = 0.0
        reference = 0.0
        worst_row = 0.0
        worst_element = 0.0
        for head in range(heads):
            at = (token * heads + head) * WIDTH + columns
            right = tl.load(theirs + at)
            if both:
                b = right.to(tl.float32)
                difference = tl.load(ours + at).to(tl.float32) - b
                d2 = tl.sum(difference * difference, axis=0)
                b2 = tl.sum(b * b, axis=0)
                row = tl.sqrt(d2) / tl.maximum(tl.sqrt(b2), 1e-37)
                # A NaN would be lost in a maximum.
                row = tl.where(row == row, row, float("inf"))
                element = tl.max(tl.abs(difference), axis=0)
                squares += d2
                reference += b2
                worst_row = tl.maximum(worst_row, row)
                worst_element = tl.maximum(worst_element, element)
            if takes:
                tl.store(ours + at, right)
        if both:
            tl.atomic_add(found, tl.where(token == 0, 1.0, 0.0))
            tl.atomic_add(found + 1, squares)
            tl.atomic_add(found + 2, reference)
            tl.atomic_max(found + 3, worst_row)
            tl.atomic_max(found + 4, worst_element)


def settle(ours: Any, theirs: Any, qo_indptr: Any, switches: Any, found: Any, *, chooses: bool) -> None:
    """Adds to `found` how two outputs differ, if both kernels ran.

    Args:
        ours, theirs: [T, H, d_latent], dense. Rows behind the last request are nobody's.
        qo_indptr: [B + 1], of the step.
        switches: int32 [3]: whether ours ran, whether theirs did, whether ours is used.
        found: float32 [FOUND], a layer's.
        chooses: theirs goes to the place of ours where ours is not used.
    """
    tokens, heads, width = ours.shape
    if tokens:
        _settle[(tokens,)](ours, theirs, qo_indptr, switches, found, len(qo_indptr) - 1, heads, chooses, width)


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def _latch(
    q,
    k,
    pool,
    mask,
    qo_indptr,
    kv_indptr,
    kv_indices,
    mask_indptr,
    found,
    state,
    kept_q,
    kept_k,
    kept_kv,
    kept_slots,
    kept_mask,
    kept_qo,
    kept_kv_indptr,
    layer,
    bound,
    batch,
    row,
    width,
    pool_stride,
    max_nodes,
    max_keys,
    FORM: tl.constexpr,
    NODES_WIDE: tl.constexpr,
    BATCH_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wanted = tl.load(state) == layer + 1
    breach = (tl.load(state + 1) != 0) & (tl.load(found + 3) > bound)
    nodes = tl.load(qo_indptr + batch)
    keys = tl.load(kv_indptr + batch)
    if (tl.load(state + 2) == 0) & (wanted | breach) & (nodes > 0):
        program = tl.program_id(0)
        # 64 bits, since rows of a large batch or pool lie beyond 2^31 elements.
        zero = program.to(tl.int64) * 0
        requests = tl.arange(0, BATCH_WIDE)
        inside = requests <= batch
        if program == 0:
            qo = tl.load(qo_indptr + requests, mask=inside)
            kv = tl.load(kv_indptr + requests, mask=inside)
            tl.store(kept_qo + requests, qo.to(tl.int64), mask=inside)
            tl.store(kept_kv_indptr + requests, kv.to(tl.int64), mask=inside)
        for node in range(program, tl.minimum(nodes, max_nodes), tl.num_programs(0)):
            at = zero + node
            _copy(q + at * row, kept_q + at * row, row, BLOCK)
            _copy(k + at * width, kept_k + at * width, width, BLOCK)
            if FORM != 0:
                # The request is the number of those that end at or before this row.
                ends = tl.load(qo_indptr + 1 + requests, mask=requests < batch, other=2147483647)
                b = tl.sum((ends <= node).to(tl.int32), axis=0)
                first = tl.load(qo_indptr + b)
                n = tl.load(qo_indptr + b + 1) - first
                columns = tl.arange(0, NODES_WIDE)
                if FORM == 1:
                    prefix = tl.load(kv_indptr + b + 1) - tl.load(kv_indptr + b)
                    start = tl.load(mask_indptr + b) + (node - first) * (prefix + n).to(tl.int64) + prefix
                else:
                    start = first.to(tl.int64) * n + (node - first) * n
                seen = tl.load(mask + start + columns, mask=columns < n, other=0)
                tl.store(kept_mask + at * NODES_WIDE + columns, seen)
        for key in range(program, tl.minimum(keys, max_keys), tl.num_programs(0)):
            slot = tl.load(kv_indices + key).to(tl.int64)
            tl.store(kept_slots + zero + key, slot)
            _copy(pool + slot * pool_stride, kept_kv + (zero + key) * width, width, BLOCK)
        # Whoever is last says so: until then each program finds the latch open.
        if tl.atomic_add(state + 3, 1) == tl.num_programs(0) - 1:
            tl.store(state + 4, nodes.to(tl.int32))
            tl.store(state + 5, keys.to(tl.int32))
            tl.store(state + 6, batch)
            tl.store(state + 7, FORM)
            tl.store(state + 3, 0)
            tl.store(state + 2, tl.where(wanted, layer + 1, -(layer + 1)))


class Latch:
    """Room for one layer's inputs of one verify step, filled on the device when they are wanted or found wanting.

    Attributes:
        state: int32 [WORDS]. The host sets what is wanted, and KEPT to 0 when it has read what was kept.
        q: bfloat16 bits [max_nodes, H, d]; k: [max_nodes, d]; kv: [max_keys, d].
        slots: int64 [max_keys]; mask: uint8 [max_nodes, max_tree].
        qo_indptr, kv_indptr: int64 [MAX_BATCH + 1].
    """

    def __init__(self, device: Any, heads: int, width: int, max_nodes: int, max_keys: int, max_tree: int) -> None:
        def empty(*shape: int, dtype: Any = torch.int16) -> Any:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_nodes, self.max_keys = max_nodes, max_keys
        self.q, self.k, self.kv = empty(max_nodes, heads, width), empty(max_nodes, width), empty(max_keys, width)
        self.slots = empty(max_keys, dtype=torch.int64)
        self.mask = empty(max_nodes, max_tree, dtype=torch.uint8)
        self.qo_indptr, self.kv_indptr = (empty(MAX_BATCH + 1, dtype=torch.int64) for _ in range(2))
        self.state = empty(WORDS, dtype=torch.int32)

    def read(self) -> dict[str, Any] | None:
        """What was kept, as arrays on the host; None where it is more than fits. Waits for the device."""
        nodes, keys, batch, form = self.state[NODES:WORDS].tolist()
        if nodes > self.max_nodes or keys > self.max_keys:
            return None

        def rows(tensor: Any, count: int) -> Any:
            return tensor[:count].cpu().numpy()

        return {
            "q": rows(self.q, nodes).view(np.uint16),
            "k": rows(self.k, nodes).view(np.uint16),
            "kv": rows(self.kv, keys).view(np.uint16),
            "slots": rows(self.slots, keys),
            "mask": rows(self.mask, nodes) if form else None,
            "qo_indptr": rows(self.qo_indptr, batch + 1),
            "kv_indptr": rows(self.kv_indptr, batch + 1),
        }

    def offer(self, given: dict[str, Any], layer: int, found: Any, bound: float, *, compact: bool) -> None:
        """Keeps the inputs of a call of the incumbent if they are wanted, or if the layer's worst row is over `bound`.

        Args:
            given: the arguments of the call, bfloat16.
            compact: the mask is n x n a request, else n x (prefix + n).
        """
        q, pool, mask = given["q_extend"].contiguous(), given["k_buffer"], given["custom_mask"]
        _, heads, width = q.shape
        batch = len(given["qo_indptr"]) - 1
        if not len(q) or batch > MAX_BATCH:
            return
        _latch[(_PROGRAMS if q.is_cuda else 2,)](
            q.view(torch.int16),
            given["k_extend"].view(torch.int16),
            pool.view(torch.int16),
            self.mask if mask is None else mask.view(torch.uint8),
            given["qo_indptr"],
            given["kv_indptr"],
            given["kv_indices"],
            given["kv_indptr"] if mask is None else given["mask_indptr"],
            found,
            self.state,
            self.q,
            self.k,
            self.kv,
            self.slots,
            self.mask,
            self.qo_indptr,
            self.kv_indptr,
            layer,
            bound,
            batch,
            heads * width,
            width,
            pool.stride(0),
            self.max_nodes,
            self.max_keys,
            0 if mask is None else 2 if compact else 1,
            self.mask.shape[1],
            triton.next_power_of_2(batch + 1),
            _BLOCK,
        )
