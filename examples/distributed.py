"""Two processes, DDP: taper before wrapping, step the controller on every process, fold on one.

torchrun --nproc_per_node 2 examples/distributed.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every process
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=4, taper_steps=6))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    controller.attach_optimizer(optimizer)

    torch.manual_seed(rank)  # and different rows
    for _ in range(12):
        ids = (torch.randint(64, (4, 1)) + 3 * torch.arange(16)) % 64
        loss = wrapped(input_ids=ids, labels=ids).loss
        (loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()  # on every process: statistics are gathered from all

    everyone = [None] * world
    dist.all_gather_object(everyone, controller.scales)
    assert all(scales == everyone[0] for scales in everyone)  # the same c, to the bit
    if rank == 0:
        report = tn.fold_(model)
        print(f"{world} processes, gate {controller.gate}, {len(report.folded)} norms folded", flush=True)
        assert world == int(os.environ["WORLD_SIZE"]) and len(report.folded) == 4
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
