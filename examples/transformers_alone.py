"""Load a norm-free folder and write text with transformers alone: tapernorm makes it, and is not there afterwards.

python examples/transformers_alone.py [NORM_FREE_FOLDER]
"""

import subprocess
import sys
import tempfile

import torch

ALONE = """
import sys
sys.modules["tapernorm"] = None  # any import of it fails, as where it is not installed
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)  # the folder brings the class
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)  # it asks as well
made = model.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=8, do_sample=False)
print(type(model).__name__, "without", *model.config.removed_norms)
assert not [name for name, _ in model.named_parameters() if "layernorm" in name]
print(tokenizer.decode(made[0], skip_special_tokens=True))
"""


def make(folder):  # a tiny norm-free model; it was not trained, so it writes nonsense
    from transformers import LlamaConfig, LlamaForCausalLM

    import tapernorm as tn
    from tapernorm.data import train_tokenizer

    tokenizer = train_tokenizer(["the cat sat on the mat in the sun", "the dog sat in the box"], 280)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=2,
            num_attention_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=1, taper_steps=1))
    for _ in range(2):
        model(input_ids=torch.arange(3, 35)[None])  # calibration needs one forward; a real run trains here
        controller.step()
    tn.fold_(model)
    tn.save_pretrained(model, folder, tokenizer=tokenizer)


def main(folder=None):
    if folder is None:
        make(folder := tempfile.mkdtemp())
    command = [sys.executable, "-c", ALONE, folder]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    assert done.returncode == 0 and "TaperNorm" in done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
