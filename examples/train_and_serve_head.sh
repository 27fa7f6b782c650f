#!/usr/bin/env bash
# Train Medusa heads for the embedded target, draft with them, and say how to serve them:
#
#     source .venv/bin/activate
#     examples/train_and_serve_head.sh FOLDER [MINUTES]
#
# FOLDER is made: the heads, their config.json and acceptance.json. The default of 0.1 minutes shows the way and little
# else; heads that pay take hours, and text like what the target will write (drafter_service/embedded/MODEL_CARD.md).
set -euo pipefail

folder=${1:?say where the heads shall go}
minutes=${2:-0.1}

# Any folder with a model and its tokenizer is a target, any file or folder of text teaches.
target=$(python -c 'from outrider.drafter_service import embedded; print(embedded.target_path())')
text=$(python -c 'import textwrap; print(textwrap.__file__)') # 19 kB of the standard library

# Small heads, of two positions over the 512 most frequent tokens. Left out, these options are as for a real target.
outrider train-drafter medusa --target "$target" --text "$text" --output "$folder" --minutes "$minutes" \
    --num-speculative-tokens 2 --draft-vocab-size 512 --rows 4 --window 64 --device cpu

# The same tokens come out whatever drafts; `speculative_decoding` says how many of the guesses were right.
drafter="{\"method\": \"medusa\", \"model\": \"$folder\", \"num_speculative_tokens\": 2}"
outrider generate -sc "$drafter" --speculation always --prompt 'def read_lines(path):' --max-tokens 32 --json

echo "serve them: outrider serve -sc '$drafter'"
