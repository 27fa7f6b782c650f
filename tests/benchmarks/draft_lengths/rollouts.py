"""`make study NAME=rollouts`: samples of the same prompts, epoch after epoch, from a policy that drifts.

Look-ups in the verifier's process, in arms that take turns on one engine: no drafts, drafts within a price from each
sample alone, the same with the prompt's history, and with its lengths besides (`WeighedSurvival`). Every sample is
seeded, so that all arms must say the same tokens: that is checked. The policy drifts by a bias on the tokens that it
said most, drawn anew in every epoch. `--virtual` shows what the lengths alone bring, in virtual time.

Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.lab.same_tokens import Pair, Seeded, Tally, compare, plain_decoding, require_same

if TYPE_CHECKING:
    from outrider.cluster.offline.engine import OfflineEngine
    from outrider.verifier_service.messages.request import GenerationRequest, LogitBias, Request

PLAIN_WIDTH = 140
MAX_DRAFT = 8
NUM_BIASED = 100  # tokens whose chances drift
OFF, OFF_AGAIN, PRICED, HISTORY, LENGTHS = "off", "off, again", "priced", "priced + history", "+ length-aware"
ARMS = (OFF, PRICED, HISTORY, LENGTHS, OFF_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is sampled."""

    prompts: Sequence[tuple[int, ...]]
    num_samples: int  # of each prompt
    max_tokens: int  # of the longest sample
    temperature: float
    drift: float  # the bias's standard deviation, in logits
    num_epochs: int


@dataclass(slots=True)
class Epoch:
    """One arm's epoch."""

    last_s: float = 0.0  # time to the last sample
    num_verifications: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)  # by sample
    requests: Sequence[GenerationRequest] = ()

    @property
    def tokens_per_verification(self) -> float:
        return sum(len(ids) for ids in self.tokens.values()) / self.num_verifications


def lengths_of(study: Study, epoch: int) -> dict[str, int]:
    """Return each sample's length: prompts differ much, samples of one prompt less, and the longest are few."""
    by_prompt = [random.Random(f"prompt {place}").lognormvariate(3.3, 0.9) for place in range(len(study.prompts))]
    found = {}
    for place, base in enumerate(by_prompt):
        for sample in range(study.num_samples):
            length = base * random.Random(f"{epoch} {place} {sample}").lognormvariate(0.0, 0.4)
            found[f"{place} {sample}"] = max(8, min(study.max_tokens, int(length)))
    return found


def biases_of(study: Study, epoch: int, said: Mapping[int, int]) -> tuple[LogitBias, ...]:
    """Return how the policy of an epoch differs from the model, on the tokens that were said most."""
    from outrider.verifier_service.messages.request import LogitBias

    chance = random.Random(epoch)
    most = [token_id for token_id, _ in Counter(said).most_common(NUM_BIASED)]
    return tuple(LogitBias(token_id=token_id, bias=chance.gauss(0.0, study.drift)) for token_id in most)


def requests_of(study: Study, arm: str, epoch: int, biases: tuple[LogitBias, ...]) -> list[GenerationRequest]:
    from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

    is_off = arm in (OFF, OFF_AGAIN)
    plan = SpeculationPlan(draft_length=0, is_pinned=True) if is_off else SpeculationPlan(draft_length=MAX_DRAFT)
    found = []
    for name, length in lengths_of(study, epoch).items():
        place = int(name.split()[0])
        sampling = SamplingParams(
            temperature=study.temperature,
            seed=random.Random(f"{epoch} {name}").getrandbits(32),
            max_tokens=length,
            ignore_eos=True,
            logit_bias=biases,
        )
        found.append(
            GenerationRequest(
                request_id=f"{arm}/{epoch}/{name}",
                prompt_token_ids=study.prompts[place],
                sampling=sampling,
                plan=plan,
                history_key=f"{arm} {place}" if arm in (HISTORY, LENGTHS) else "",
            )
        )
    return found


def run_epoch(
    offline: OfflineEngine, requests: Sequence[GenerationRequest], end_step: Callable[[], None] = lambda: None
) -> Epoch:
    """Run samples together to the last one."""
    found = Epoch(tokens={request.request_id.split("/")[2]: [] for request in requests}, requests=requests)
    began_s = time.perf_counter()
    for request in requests:
        assert offline.engine.add(request) is None
    while offline.engine.has_work():
        for output in offline.step():
            found.tokens[output.request_id.split("/")[2]] += output.token_ids
            found.num_verifications += bool(output.token_ids)
        end_step()
    found.last_s = time.perf_counter() - began_s
    return found


def expected_length(lengths: Mapping[str, Sequence[int]], request: Request) -> float | None:
    """Return the median of a prompt's earlier lengths beyond the present one; None: there is none."""
    arm, _, name = request.request_id.split("/")
    longer = [length for length in lengths[name.split()[0]] if length > request.num_output_tokens]
    return statistics.median(longer) if arm == LENGTHS and longer else None


def measure(offline: OfflineEngine, study: Study, on_run: Callable[[str], None]) -> dict[str, list[Epoch]]:
    """Return each arm's epochs."""
    from benchmarks.draft_lengths.tail_shares import WeighedSurvival

    lengths: dict[str, list[int]] = defaultdict(list)  # by prompt, of earlier epochs
    survival = WeighedSurvival(lambda: offline.engine.requests.values())
    survival.expect = lambda request: expected_length(lengths, request)
    offline.engine.pricing.survival = survival
    found: dict[str, list[Epoch]] = {arm: [] for arm in ARMS}
    said: Counter[int] = Counter()
    run_epoch(offline, requests_of(study, OFF, -1, ()))  # a cold machine: it does not count
    for epoch in range(study.num_epochs):
        biases = biases_of(study, epoch, said) if epoch else ()
        offline.engine.drafting.filing.weight_version = str(epoch)
        for arm in ARMS[epoch % len(ARMS) :] + ARMS[: epoch % len(ARMS)]:
            one = run_epoch(offline, requests_of(study, arm, epoch, biases), survival.end_step)
            found[arm].append(one)
            on_run(f"epoch {epoch}, {arm}: {one.last_s:.2f} s")
        for name, ids in found[OFF][-1].tokens.items():
            lengths[name.split()[0]].append(len(ids))
            said.update(ids)
    return found


def pairs_of(found: Mapping[str, Sequence[Epoch]]) -> list[Pair]:
    """Return every sample of an arm beside the one without drafts."""
    return [
        Pair(
            what=request.request_id,
            prompt=request.prompt_token_ids,
            expected=expected,
            given=given,
            seeded=Seeded(
                seed=request.sampling.seed or 0,
                temperature=request.sampling.temperature,
                biases=tuple((each.token_id, each.bias) for each in request.sampling.logit_bias),
            ),
        )
        for arm, epochs in found.items()
        if arm != OFF
        for plain, one in zip(found[OFF], epochs, strict=True)
        for request, expected, given in zip(one.requests, plain.tokens.values(), one.tokens.values(), strict=True)
    ]


def to_rows(found: Mapping[str, Sequence[Epoch]]) -> list[list[str]]:
    rows = []
    for arm, epochs in found.items():
        row = [arm]
        for plain, again, one in zip(found[OFF], found[OFF_AGAIN], epochs, strict=True):
            gain = (plain.last_s + again.last_s) / 2 / one.last_s
            row += [f"{one.last_s:.2f} s", f"{gain:.2f}", f"{one.tokens_per_verification:.2f}"]
        rows.append(row)
    return rows


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--model", help="Default: the embedded target.")
@click.option("--num-prompts", type=click.IntRange(1), default=16, show_default=True)
@click.option("--num-samples", type=click.IntRange(1), default=4, show_default=True)
@click.option("--max-tokens", type=click.IntRange(8), default=256, show_default=True)
@click.option("--temperature", "temperatures", type=float, multiple=True, default=(1.0, 0.6), show_default=True)
@click.option("--drift", type=click.FloatRange(0), default=0.3, show_default=True, help="Of the bias, in logits.")
@click.option("--epochs", "num_epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--virtual", "num_orders", type=click.IntRange(0), default=0, help="What lengths bring; so many draws.")
def rollouts(
    model: str | None, num_prompts: int, temperatures: Sequence[float], num_orders: int, **options: float
) -> None:
    """Show the time to the last of many samples, epoch by epoch: without drafts, priced, with history, with lengths."""
    console = console_of(PLAIN_WIDTH)
    if num_orders:
        from benchmarks.draft_lengths.tail_shares import gains

        shares = gains(num_orders, lambda line: click.echo(line, err=True))
        rows = [
            [name, f"{statistics.fmean(all_):.3f}", f"{min(all_):.3f}", f"{max(all_):.3f}"]
            for name, all_ in shares.items()
        ]
        console.print("\n".join(markdown_table(["scenario", "gain, mean", "least", "most"], rows, num_left=1)))
        return
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.cluster.offline.engine import OfflineEngine
    from outrider.lab.bench.pairs import describe_machine, read_prompts

    look_ups = {"method": "suffix", "location": "verifier", "num_speculative_tokens": MAX_DRAFT}
    config = ServiceConfig(model=model, rollouts=True, speculative_config=look_ups)
    prompts = read_prompts(config, None)[:num_prompts]
    headings = ["arm"]
    for epoch in range(int(options["num_epochs"])):
        headings += [f"epoch {epoch}: last sample", "of off", "tokens a verification"]
    console.print(describe_machine())
    tallies: list[Tally] = []
    for temperature in temperatures:
        study = Study(prompts=prompts, temperature=temperature, **options)  # type: ignore[arg-type]
        with OfflineEngine(config, prices_drafts=True) as offline:
            found = measure(offline, study, lambda line: click.echo(line, err=True))
        console.print(
            f"\nT = {temperature:g}, {num_prompts} prompts x {study.num_samples} samples, drift {study.drift:g}\n"
        )
        console.print("\n".join(markdown_table(headings, to_rows(found), num_left=1)))
        tallies.append(compare(pairs_of(found), plain_decoding(config.verifier_spec.model)))
        console.print(f"\nBeside samples without drafts: {tallies[-1]}")
    require_same(*tallies)
