"""Steps of TRL's GRPOTrainer on a GPU, with the flags of a run of algorithms/grpo.py: gpu.py --part trl.

    pip install trl==1.16.0

Prompts, lengths, precision and --gradient-checkpointing are those of the flags, and so are rows at
a time (32 without --micro-batch-size); weights are float32, and loss, optimizer and learning rate
are fixed here. Other flags have no effect. All rewards are 1, so TRL's advantages are 0; it
computes every row all the same. With --vllm the engine is in the process ("colocate") and has the
same share of the GPU. The rest are TRL's defaults: the engine does not sleep, and one more forward
pass gives the log-probabilities that correct for the sampler; our scripts put the engine to sleep,
and take them from the training pass. Attention by cuDNN is on in TRL and off in our scripts. Writes
the seconds of each step to OUTPUT_DIR/metrics.csv, as the scripts do.
"""

import csv
import sys
import time
from pathlib import Path

import datasets
import torch
import transformers
import trl
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algorithms import grpo  # noqa: E402
from envs.countdown import Countdown  # noqa: E402


class Clock(transformers.TrainerCallback):
    """Seconds of each step, written when it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.rows = [("step", "tag", "value")]

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.rows.append((state.global_step, "train/seconds/step", now - self.began))
        self.began = now
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows(self.rows)


def main(args: grpo.Args) -> None:
    args.max_completion_length = args.max_completion_length or 80
    task = Countdown()
    count = args.max_steps * args.num_prompts_per_step
    prompts = [{"prompt": task.prompt(task.train_problem(i, args.seed))} for i in range(count)]
    rows = args.num_prompts_per_step * args.num_generations
    size = min(rows, args.micro_batch_size or 32)
    work = {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}
    work["max_steps"] = args.max_steps
    same = {name: getattr(args, name) for name in ("num_generations", "max_completion_length", "bf16", "max_grad_norm")}
    same |= {"learning_rate": 1e-6, "loss_type": "grpo", "beta": 0.0, "shuffle_dataset": False}
    same |= {"gradient_checkpointing": args.gradient_checkpointing, "model_init_kwargs": {"dtype": "float32"}}
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    if args.vllm:
        length = args.max_prompt_length + args.max_completion_length
        same |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm_memory}
        same["vllm_max_model_length"] = length
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name_or_path)
    if tokenizer.eos_token is None:  # TRL wants one; of random weights any token is as rare
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    output = Path(args.output_dir)
    output.mkdir(parents=True)
    trainer = trl.GRPOTrainer(
        model=args.model_name_or_path,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        args=trl.GRPOConfig(output_dir=str(output), use_cpu=not torch.cuda.is_available(), **work, **same, **quiet),
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[Clock(output / "metrics.csv")],
    )
    trainer.train()


if __name__ == "__main__":
    main(tyro.cli(grpo.Args))
