"""Pre-train a small BERT on the bytes of your own files, in a plain PyTorch loop.

    python examples/bert_mlm.py README.md docs/*.md --steps 300

The two lines that hfai is about are marked. Everything else is what the script would be without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hfai.models import bert_tiny_MLM
from hfai.nn import to_hfai, to_torch

MASK = 256  # the token after the 256 bytes


def masked_batch(
    text: torch.Tensor, batch_size: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take windows at random and hide 15 % of their bytes: (input ids, labels), both [B, L]."""
    starts = torch.randint(len(text) - length + 1, (batch_size, 1))
    ids = text[starts + torch.arange(length)].long()
    hidden = torch.rand(ids.shape) < 0.15
    return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, -100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="text of at least --length bytes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--save", type=Path, default=Path("bert.pt"))
    arguments = parser.parse_args()

    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in arguments.files)), dtype=torch.uint8
    )
    if len(text) < arguments.length:
        parser.error(f"the files hold {len(text)} bytes, fewer than --length {arguments.length}")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = bert_tiny_MLM(vocab_size=264, max_length=arguments.length).to(device)
    model = to_hfai(model)  # hfai: faster layers, the same parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(1, arguments.steps + 1):
        ids, labels = masked_batch(text, arguments.batch_size, arguments.length)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids.to(device), labels=labels.to(device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 50 == 0 or step == arguments.steps:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)

    model = to_torch(model)  # hfai: plain torch again; the state dict needs no hfai to be loaded
    torch.save(model.state_dict(), arguments.save)
    print(f"saved {arguments.save}")


if __name__ == "__main__":
    main()
