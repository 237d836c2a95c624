"""Train the tiny target and its drafter within a wall-clock budget, and measure both.

    python3 -m phases.tiny_model.train --out DIR --target-seconds 270 --drafter-seconds 150

Writes to DIR, again and again while it runs: target.safetensors, config.json, drafter.safetensors,
drafter.json and training.log (JSON lines). Needs numpy, torch, transformers and safetensors, no
network. Weights are bfloat16; every held-out figure is of the rounded weights, upcast to float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

from phases.tiny_model import corpus, decode, drafter, model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SEED = 20260601
DEPTH_WEIGHT = 0.85
# The last quarter of the target's budget uses long rows, so that prefixes beyond CONTEXT work.
CONTEXT, LONG_CONTEXT, LONG_SHARE = 512, 2048, 0.25
# (name, budget without the root, candidates per depth)
SHAPES = (("chain", 7, 1), ("ddtree_b16", 16, 16))


class Log:
    """Appends JSON lines to a file and repeats them on stdout."""

    def __init__(self, path: Path) -> None:
        self._path, self._start = path, time.monotonic()
        path.write_text("")

    def __call__(self, event: str, **values: object) -> None:
        seconds = round(time.monotonic() - self._start, 2)
        line = json.dumps({"event": event, "seconds": seconds, **values})
        with self._path.open("a") as stream:
            stream.write(line + "\n")
        print(line, flush=True)


class Optimizers:
    """Muon for the hidden matrices, AdamW for the rest, one schedule for both."""

    def __init__(self, module: nn.Module, rate: float, *, adam_names: tuple[str, ...]) -> None:
        matrices: list[Tensor] = []
        rest: list[Tensor] = []
        for name, parameter in module.named_parameters():
            is_matrix = parameter.ndim == 2 and not name.startswith(adam_names)
            (matrices if is_matrix else rest).append(parameter)
        self._parameters = matrices + rest
        self._rate = rate
        self._optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, progress: float) -> None:
        """Update at `progress` in [0, 1] of the budget: short warm-up, then linear to zero."""
        rate = self._rate * min(progress / 0.02, 1.0) * max(1.0 - progress, 0.01)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class Crops:
    """Random rows of a token stream that lives on the device."""

    def __init__(self, tokens: np.ndarray, device: str, seed: int) -> None:
        self._tokens = torch.from_numpy(tokens).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, rows: int, length: int) -> Tensor:
        """Return int64 [rows, length + 1]."""
        last = len(self._tokens) - length - 1
        device = self._tokens.device
        starts = torch.randint(0, last, (rows, 1), generator=self._generator, device=device)
        return self._tokens[starts + torch.arange(length + 1, device=device)].long()

    def integers(self, low: int, high: int, shape: tuple[int, int]) -> Tensor:
        """Return random int64 in [low, high)."""
        device = self._tokens.device
        return torch.randint(low, high, shape, generator=self._generator, device=device)


def autocast(device: str) -> torch.autocast:
    """Return the mixed-precision context of training."""
    return torch.autocast(torch.device(device).type, torch.bfloat16)


def next_token_loss(target: Any, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of rows [B, S + 1] in nats per token."""
    logits = target(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def held_out_loss(target: Any, tokens: np.ndarray, rows: int, length: int, batch: int) -> float:
    """Return the float32 loss over `rows` evenly spaced rows of the held-out stream."""
    starts = np.linspace(0, len(tokens) - length - 2, rows).astype(np.int64)
    crops = torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    losses = [float(next_token_loss(target, part.to(target.device))) * len(part) for part in crops.split(batch)]
    return sum(losses) / rows


def train_target(args: argparse.Namespace, text: corpus.Corpus, log: Log) -> Any:
    """Train the target, saving its rounded weights at every evaluation; return it frozen."""
    torch.manual_seed(SEED)
    settings = model.config()
    settings._attn_implementation = "sdpa"
    target = transformers.DeepseekV3ForCausalLM(settings).to(args.device).train()
    settings.save_pretrained(args.out)
    optimizers = Optimizers(target, args.target_rate, adam_names=("model.embed_tokens", "lm_head"))
    crops = Crops(text.train, args.device, SEED)
    log("target", parameters=sum(p.numel() for p in target.parameters()))

    def checkpoint(step: int, loss: float, *, rows: int) -> Any:
        weights = model.rounded(target)
        model.save(weights, args.out / "target.safetensors")
        frozen = model.build(weights, device=args.device)
        held_out = {
            f"held_out_{length}": round(
                held_out_loss(frozen, text.held_out, max(rows * 512 // length, 1), length, 16), 4
            )
            for length in (CONTEXT, LONG_CONTEXT)
        }
        log("target", step=step, tokens=tokens, train=round(loss, 4), **held_out)
        return frozen

    step, tokens, begin, spent_outside, next_checkpoint = 0, 0, time.monotonic(), 0.0, 0.1
    running: list[Tensor] = []
    while True:
        if step % 10 == 0 and args.device != "cpu":
            torch.cuda.synchronize()
        progress = (time.monotonic() - begin - spent_outside) / args.target_seconds
        if progress >= 1.0:
            break
        length = LONG_CONTEXT if progress > 1.0 - LONG_SHARE else CONTEXT
        rows = crops.take(max(args.tokens_per_step // length, 1), length)
        with autocast(args.device):
            loss = next_token_loss(target, rows)
        loss.backward()
        optimizers.step(progress)
        step, tokens = step + 1, tokens + rows[:, 1:].numel()
        running.append(loss.detach())
        if step == 1:  # the first step pays for start-up: count from its end
            loss.item()
            begin = time.monotonic()
        if step % args.log_every == 0:
            mean = float(torch.stack(running).mean())
            running.clear()
            log("target", step=step, tokens=tokens, train=round(mean, 4))
            if not np.isfinite(mean):
                raise SystemExit("target loss is not finite; lower --target-rate")
        if progress > next_checkpoint:
            paused = time.monotonic()
            checkpoint(step, loss.item(), rows=args.held_out_rows)
            next_checkpoint = progress + 0.1
            spent_outside += time.monotonic() - paused
    return checkpoint(step, loss.item(), rows=4 * args.held_out_rows)


def drafter_loss(student: drafter.Drafter, target: Any, features: model.Features, crops: Crops, rows: Tensor) -> Tensor:
    """Return the cross-entropy [block_size - 1] of each depth against the target's own law.

    Averaged over texts, the target's conditional law of the k-th next byte is the marginal that the
    drafter must learn; using it in place of the byte in the text lowers the variance.
    """
    size, anchors = student.config.block_size, 32
    with torch.no_grad():
        law = target(input_ids=rows[:, :-1], use_cache=False).logits.float().softmax(-1)
        states = features.take()
    length = states.shape[1]
    anchor = crops.integers(0, length - size + 1, (len(rows), anchors))
    position = torch.arange(length, device=rows.device).expand(len(rows), -1)
    logits = student(states, position, rows.gather(1, anchor), anchor, target.model.embed_tokens.weight)
    wanted = anchor[:, :, None] + torch.arange(size - 1, device=rows.device)
    batch = torch.arange(len(rows), device=rows.device)[:, None, None]
    return -(law[batch, wanted] * logits.float().log_softmax(-1)).sum(-1).mean((0, 1))


def train_drafter(
    args: argparse.Namespace, text: corpus.Corpus, target: Any, features: model.Features, log: Log
) -> drafter.Drafter:
    """Train the drafter on the frozen target, saving it regularly; return it frozen."""
    torch.manual_seed(SEED + 1)
    settings = drafter.DrafterConfig()
    student = drafter.Drafter(settings).to(args.device).train()
    (args.out / "drafter.json").write_text(drafter.config_json(settings))
    optimizers = Optimizers(student, args.drafter_rate, adam_names=("mask_embedding",))
    crops = Crops(text.train, args.device, SEED + 1)
    weight = DEPTH_WEIGHT ** torch.arange(settings.block_size - 1, device=args.device)
    log("drafter", parameters=sum(p.numel() for p in student.parameters()))

    def checkpoint() -> dict[str, Tensor]:
        weights = model.rounded(student)
        model.save(weights, args.out / "drafter.safetensors")
        return weights

    step, begin, next_checkpoint = 0, time.monotonic(), 0.1
    while True:
        if step % 10 == 0 and args.device != "cpu":
            torch.cuda.synchronize()
        progress = (time.monotonic() - begin) / args.drafter_seconds
        if progress >= 1.0:
            break
        rows = crops.take(max(args.tokens_per_step // 2 // CONTEXT, 1), CONTEXT)
        with autocast(args.device):
            depths = drafter_loss(student, target, features, crops, rows)
            loss = (depths * weight).sum() / weight.sum()
        loss.backward()
        optimizers.step(progress)
        step += 1
        if step == 1:
            loss.item()
            begin = time.monotonic()
        if step % args.log_every == 0:
            per_depth = [round(value, 3) for value in depths.tolist()]
            log("drafter", step=step, train=round(loss.item(), 4), per_depth=per_depth)
            if not np.isfinite(per_depth).all():
                raise SystemExit("drafter loss is not finite; lower --drafter-rate")
        if progress > next_checkpoint:
            checkpoint()
            next_checkpoint = progress + 0.1
    per_depth = [round(value, 3) for value in depths.tolist()]
    log("drafter", step=step, train=round(loss.item(), 4), per_depth=per_depth)
    return drafter.build(checkpoint(), settings, device=args.device)


def measure(
    args: argparse.Namespace,
    text: corpus.Corpus,
    target: Any,
    features: model.Features,
    student: drafter.Drafter,
    log: Log,
) -> None:
    """Log tokens per round on held-out prompts, and whether the text equals plain greedy's."""
    starts = np.linspace(0, len(text.held_out) - 400, args.prompts).astype(int)
    prompts = [text.held_out[start : start + 200].tolist() for start in starts]
    plain = []
    for prompt in prompts:
        plain.append(decode.greedy(target, prompt, args.new_tokens))
    sample = bytes(min(token, 255) for token in prompts[0][-60:] + plain[0])
    log("sample", text=sample.decode("utf-8", "replace"))
    for name, budget, width in SHAPES:
        sizes: list[int] = []
        lossless = 0
        for prompt, wanted in zip(prompts, plain, strict=True):
            decoded = decode.speculate(target, features, student, prompt, args.new_tokens, budget=budget, width=width)
            sizes += decoded.round_sizes
            lossless += decoded.tokens == wanted
        log(
            "acceptance",
            drafts=name,
            rounds=len(sizes),
            tokens_per_round=round(float(np.mean(sizes)), 3),
            histogram=np.bincount(sizes, minlength=9)[1:].tolist(),
            lossless=f"{lossless} of {len(prompts)}",
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="phases.tiny_model.train", description="Train the tiny target and its drafter."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--corpus", type=Path, default=corpus.standard_library())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-seconds", type=float, default=270.0)
    parser.add_argument("--drafter-seconds", type=float, default=150.0)
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--target-rate", type=float, default=3e-3)
    parser.add_argument("--drafter-rate", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    parser.add_argument("--held-out-rows", type=int, default=256, help="512-token rows each time")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts for acceptance")
    parser.add_argument("--new-tokens", type=int, default=96, help="bytes generated for each")
    parser.add_argument("--target", type=Path, help="skip the first half: use these weights")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the whole training; see the module's docstring."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "training.log")
    is_cuda = torch.device(args.device).type == "cuda"
    # cuDNN's attention lacks plans for some of these head widths; the others have none missing.
    torch.backends.cuda.enable_cudnn_sdp(False)
    log(
        "start",
        device=torch.cuda.get_device_name(args.device) if is_cuda else "cpu",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=SEED,
        tokens_per_step=args.tokens_per_step,
        target_rate=args.target_rate,
        drafter_rate=args.drafter_rate,
    )
    text = corpus.load(args.corpus)
    log("corpus", **text.description)
    target = model.build(args.target, device=args.device) if args.target else train_target(args, text, log)
    features = model.Features(target)
    student = train_drafter(args, text, target, features, log)
    measure(args, text, target, features, student, log)
    for name in ("target.safetensors", "drafter.safetensors"):
        if (args.out / name).exists():
            log("size", file=name, bytes=(args.out / name).stat().st_size)
    log("done")


if __name__ == "__main__":
    main()
