"""Makes tests/data/smollm2_golden.json: greedy tokens of SmolLM2 from NumPy in float64.

    python tests/oracles/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

Nothing of jspec is used: the weights are dequantised by the gguf package, the rows of q and k put
back in the half-rotation order here, and the model is `numpy_llama`. The prompts are ours, and
their ids are those of the model's tokenizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.oracles import numpy_llama  # noqa: E402

TOKENS = 24
# Text and its ids; the last is a whole chat.
PROMPTS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "def fibonacci(n):\n    ": [1604, 3987, 46477, 24, 94, 727, 2367],
    "1, 2, 3, 4, 5, 6,": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28],
    "Once upon a time there was a": [6403, 1980, 253, 655, 665, 436, 253],
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n": [
        *(1, 4093, 198, 5820, 1296, 14797, 30, 2, 198, 1, 520, 9531, 198)
    ],
}


def load(path: str) -> numpy_llama.Llama:
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    def weight(name: str) -> numpy_llama.Array:
        tensor = tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    heads, groups = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    head_dim = field("llama.embedding_length") // heads

    def half_rotation(matrix: numpy_llama.Array, count: int) -> numpy_llama.Array:
        # GGUF interleaves a head's rows as pairs (0, H/2), (1, H/2 + 1), ..
        pairs = matrix.reshape(count, head_dim // 2, 2, -1)
        return pairs.transpose(0, 2, 1, 3).reshape(matrix.shape)

    def layer(index: int) -> numpy_llama.Layer:
        name = f"blk.{index}."
        return numpy_llama.Layer(
            input_norm=weight(name + "attn_norm.weight"),
            q=half_rotation(weight(name + "attn_q.weight"), heads),
            k=half_rotation(weight(name + "attn_k.weight"), groups),
            v=weight(name + "attn_v.weight"),
            o=weight(name + "attn_output.weight"),
            post_norm=weight(name + "ffn_norm.weight"),
            gate=weight(name + "ffn_gate.weight"),
            up=weight(name + "ffn_up.weight"),
            down=weight(name + "ffn_down.weight"),
        )

    return numpy_llama.Llama(
        embedding=weight("token_embd.weight"),
        layers=[layer(index) for index in range(field("llama.block_count"))],
        norm=weight("output_norm.weight"),
        head=weight("output.weight") if "output.weight" in tensors else None,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        theta=float(field("llama.rope.freq_base")),
    )


def main(path: str) -> None:
    model = load(path)
    cases = []
    for text, ids in PROMPTS.items():
        tokens, gaps = model.greedy(ids, TOKENS)
        logits = model.run(ids)[0][-1]
        top = np.argsort(logits)[::-1][:5]
        cases.append(
            {
                "text": text,
                "prompt_ids": ids,
                "greedy_ids": tokens,
                "gap": [round(gap, 5) for gap in gaps],
                "first_top5": [[int(t), round(float(logits[t]), 5)] for t in top],
            }
        )
    (ROOT / "tests/data").mkdir(exist_ok=True)
    with (ROOT / "tests/data/smollm2_golden.json").open("w", encoding="utf-8") as file:
        lines = ",\n".join(json.dumps(case) for case in cases)
        file.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
