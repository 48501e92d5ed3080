"""One model over two processes: each holds half of its heads, and their keys and values in half a pool.

python examples/tensor_parallel.py                              # starts itself under torchrun, two processes on CPU
torchrun --nproc-per-node 2 examples/tensor_parallel.py NAME    # a name or a folder
"""

import os
import subprocess
import sys
import tempfile
import threading

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_paged

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]


def make_model(folder: str) -> None:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(name: str) -> None:
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=size)).eval()

    # Every process runs the same program, as with stock transformers.
    prompt = torch.tensor(PROMPTS[:1], device=model.device)
    stock = model.generate(prompt, max_new_tokens=24, do_sample=False)
    hf_paged.patch(model, num_blocks=64)
    paged = model.generate(prompt, max_new_tokens=24, do_sample=False)
    print(f"rank {rank} of {size}: same tokens as before: {torch.equal(stock, paged)}", flush=True)
    print(f"rank {rank} of {size}: bytes of a KV block here: {model.paged.bytes_per_block}", flush=True)

    # Or one of them runs an app, and the others serve its steps until it ends.
    if rank > 0:
        model.paged.follow()
        return
    threads = [
        threading.Thread(
            target=model.generate, args=(torch.tensor([ids], device=model.device),), kwargs={"max_new_tokens": 16}
        )
        for ids in PROMPTS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = model.paged.stats()
    print(f"an app on rank 0: {stats.num_generated_tokens} tokens in {stats.num_steps} steps")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            make_model(made)
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, made]
            sys.exit(subprocess.run(command, check=False).returncode)
