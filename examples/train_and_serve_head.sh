#!/usr/bin/env bash
# Train Medusa heads for the embedded target, draft with them, and say how to serve them:
#
#     source .venv/bin/activate
#     examples/train_and_serve_head.sh FOLDER [STEPS]
#
# FOLDER is made: the heads and what they reached on text held out. A hundred steps show the way and little else; heads
# that pay take hours, and text like what the target will write (drafter_service/embedded/MODEL_CARD.md).
set -euo pipefail

folder=${1:?say where the heads shall go}
num_steps=${2:-100}

# Any folder with a model and its tokenizer is a target; any file or folder of text teaches.
target=$(python -c 'from outrider.drafter_service import embedded; print(embedded.target_path())')
text=$(python -c 'import textwrap; print(textwrap.__file__)') # 19 kB of the standard library

# Two small heads over the 512 most frequent tokens, and short windows. For heads that are meant, leave these out.
small=(--num-speculative-tokens 2 --draft-vocab-size 512 --rows 4 --window 32 --device cpu)
outrider train-drafter medusa --target "$target" --text "$text" --output "$folder" --steps "$num_steps" "${small[@]}"

# The same tokens come out whatever drafts; `speculative_decoding` says how many of the guesses were right.
drafter="{\"method\": \"medusa\", \"model\": \"$folder\", \"num_speculative_tokens\": 2}"
outrider generate embedded -sc "$drafter" --speculation always --prompt 'def read_lines(path):' --max-tokens 16 --json

echo "serve them: outrider serve embedded -sc '$drafter'"
