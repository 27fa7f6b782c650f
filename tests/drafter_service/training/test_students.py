"""A student's rows are those of the drafter that is served: same roots, same states, same positions."""

import pytest
import torch

from fakes.backend import build_tokenizer
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.speculative_config import Location, SpeculativeConfig
from outrider.drafter_service.service.speculative_config import Method as ServedMethod
from outrider.drafter_service.training.distil import make_student
from outrider.drafter_service.training.draft_model import DraftModelStudent
from outrider.drafter_service.training.eagle import eagle_student
from outrider.drafter_service.training.eagle3 import Eagle3Shape, eagle3_student
from outrider.drafter_service.training.medusa import MedusaShape, MedusaStudent
from outrider.drafter_service.training.objectives import FIRST_DRAFTED_ROW, Objective, draft_loss
from outrider.drafter_service.training.parallel_draft import ParallelStudent, canvas_of, visible, visible_blocks
from outrider.drafter_service.training.student import MAX_SPAN, position_loss
from outrider.drafter_service.training.teacher import FINAL_TAP, TaughtLesson, Teacher, check_taps, default_taps
from outrider.drafter_service.training.unrolled import UnrolledAttention
from outrider.verifier_service.formats.checkpoint import StateDictSource
from outrider.verifier_service.messages.draft import DraftSampling
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.dflash import slow_block
from tiny.drafters import eagle_drafter
from tiny.models import make_model
from tiny.training import (
    DRAFT_VOCAB_SIZE,
    VOCAB_SIZE,
    make_corpus,
    make_teacher,
    make_tiny_student,
    options_for,
    write_target,
)

GREEDY = DraftSampling(temperature=0.0)
NUM_POSITIONS = 3


def shaken(module):
    """Move all weights, so that nothing rests on how a new head begins."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def random_eagle3(**shape):
    shape = Eagle3Shape(**({"draft_vocab_size": DRAFT_VOCAB_SIZE} | shape))
    student = eagle3_student(make_teacher(), make_corpus().training, shape=shape, num_positions=NUM_POSITIONS, seed=0)
    shaken(student.module)
    return student


def medusa_student(**shape):
    student = MedusaStudent.create(
        make_teacher(), make_corpus().training, shape=MedusaShape(**shape), num_heads=NUM_POSITIONS, seed=0
    )
    shaken(student.module)
    return student


def windows(rows=2, window=12):
    return make_corpus().training.batch(0, rows=rows, window=window, seed=0).token_ids


@torch.no_grad()
def test_each_unrolled_step_is_the_head_run_over_its_own_path():
    student = random_eagle3()
    head = student.module
    lesson = student.teacher.lesson(windows(rows=1))
    unrolled = student.position_logits(lesson)
    assert [tuple(rows.shape) for rows in unrolled] == [(1, 9, DRAFT_VOCAB_SIZE)] * NUM_POSITIONS
    for root in range(9):
        hidden = head.combine(lesson.states[:, : root + 1])  # [1, root + 1, hidden_size]
        for step in range(NUM_POSITIONS):
            length = hidden.shape[1]
            output = head(lesson.token_ids[:, 1 : 1 + length], hidden, torch.arange(length)[None])
            expected = head.logits(output.output[:, -1])
            assert torch.allclose(unrolled[step][:, root], expected, atol=1e-5), (root, step)
            hidden = torch.cat([hidden, output.feedback[:, -1:]], dim=1)


def served_eagle(student, tmp_path):
    student.save(tmp_path / "head")
    target = StateDictSource(dict(student.teacher.model.state_dict()))
    head = Eagle3Head.from_folder(tmp_path / "head", target=target, num_target_layers=4)
    runner = HeadRunner(SwitchedHeads([head]), num_blocks=8, block_size=4, max_model_len=64)
    return eagle_drafter(runner, torch.Generator(), vocab_size=VOCAB_SIZE)


def served_medusa(student, tmp_path):
    student.save(tmp_path / "heads")
    heads = MedusaHeads.from_folder(tmp_path / "heads")
    return MedusaDrafter(heads, vocab_size=VOCAB_SIZE, max_model_len=64, rng=torch.Generator())


@pytest.mark.parametrize(
    ("make", "serve"),
    [
        (random_eagle3, served_eagle),
        (lambda: random_eagle3(draft_vocab_size=VOCAB_SIZE, taps=(0, 1, 3)), served_eagle),
        (medusa_student, served_medusa),
        (lambda: medusa_student(draft_vocab_size=DRAFT_VOCAB_SIZE, num_layers=2), served_medusa),
    ],
    ids=["eagle3", "eagle3-whole-vocabulary", "medusa", "medusa-reduced-vocabulary"],
)
def test_the_served_drafter_drafts_what_the_student_says(make, serve, tmp_path):
    student = make()
    assert_same_drafts(serve(student, tmp_path), student)


@torch.no_grad()
def assert_same_drafts(drafter, student):
    for number, tokens in enumerate(windows(rows=6, window=10)):
        states = student.teacher.lesson(tokens[None]).states[0, :-1]  # the last token has none yet
        ask = Ask(key=SessionKey("v", f"r{number}"), ask_id=number, token_ids=tokens.tolist(), sampling=GREEDY,
                  length=NUM_POSITIONS, states=states)  # fmt: skip
        drafted: list = []
        while not drafted:
            drafted = drafter.draft([ask], max_num_tokens=64)
        chain = list(drafted[0].token_ids)
        assert len(chain) == NUM_POSITIONS
        # the student on the same text with the draft behind it; the last root is where the draft began
        lesson = student.teacher.lesson(torch.cat([tokens, torch.tensor(chain)])[None])
        root = len(tokens) - 2
        for position, rows in enumerate(student.position_logits(lesson)):
            likeliest = int(rows[0, root].argmax())
            target_id = likeliest if student.vocab_ids is None else int(student.vocab_ids[likeliest])
            assert target_id == chain[position], (number, position)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "target"
    write_target(folder)
    return folder


@pytest.mark.parametrize("method", ["mlp-speculator", "eagle", "mtp", "parallel-draft", "dflash"])
def test_what_a_service_builds_from_the_folder_drafts_what_the_student_says(method, target, tmp_path):
    teacher = Teacher.load(target, torch.device("cpu"))
    student = make_student(options_for(method, tmp_path), teacher, build_tokenizer(), make_corpus())
    shaken(student.module)
    student.save(tmp_path / "drafter")
    folder = str(tmp_path / "drafter")
    model = ModelConfig(path=folder, device="cpu", dtype="float32", num_kv_blocks=32, check_logits=False)
    spec = DrafterSpec(
        model=model,
        target=ModelConfig(path=str(target), device="cpu"),
        speculative=SpeculativeConfig(method=ServedMethod(method.replace("-", "_")), location=Location.VERIFIER),
    )
    runner = ParallelRunner(ModelRunner(model, TensorParallelGroup.single())) if spec.loads_model else None
    assert_same_drafts(build_drafter(spec, runner=runner), student)


def test_a_new_head_says_what_the_target_says_next():
    # fc passes the last tapped state on; with attention and feed-forward silenced it reaches norm and output embedding
    student = eagle3_student(make_teacher(), make_corpus().training, shape=Eagle3Shape(), num_positions=1, seed=0)
    layer, teacher = student.module.midlayer, student.teacher
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        lesson = teacher.lesson(windows())
        (rows,) = student.position_logits(lesson)
        early_exit = teacher.head @ teacher.model.model.norm(lesson.states[..., -teacher.hidden_size :])[0, 4]
    assert torch.allclose(rows[0, 4], early_exit, atol=1e-5)


@torch.no_grad()
def test_a_new_eagle_head_repeats_the_target():
    student = eagle_student(make_teacher(), num_positions=2, seed=0)
    lesson = student.teacher.lesson(windows())
    for rows in student.position_logits(lesson):
        assert torch.allclose(rows, lesson.logits()[:, :10], atol=1e-4)


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash"])
def test_a_head_under_the_targets_tables_leaves_them_as_they_are(method):
    student = make_tiny_student(method)
    frozen = {name for name, parameter in student.module.named_parameters() if not parameter.requires_grad}
    assert frozen == student.module.borrowed == {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(student.module.lm_head.weight, student.teacher.head)


def test_a_mask_sees_the_text_up_to_its_root_and_the_roots_masks_before_it():
    roots, depths = canvas_of(range(2), 3, torch.device("cpu"))
    # text 0 1 2, then the first masks of both roots, then the second ones
    assert (roots + depths + 1).tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert visible(roots, depths).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
    ]


def test_masks_of_a_block_see_each_other_and_the_text_up_to_their_root():
    roots, depths = canvas_of(range(2), 3, torch.device("cpu"))
    assert visible_blocks(roots, depths).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
        [1, 1, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
    ]


@torch.no_grad()
def test_a_target_that_is_taught_to_draft_begins_as_the_target_and_guesses_behind_the_token_it_has_not_drawn():
    student = make_tiny_student("tidar")
    lesson = student.teacher.lesson(windows(rows=1))
    text, mask = lesson.token_ids[0].tolist(), student.module.config.mask_token_id
    first, *_ = student._guess(lesson, range(9))
    assert torch.allclose(first, lesson.logits()[:, 1:10], atol=1e-5)
    shaken(student.module)
    guesses = student.position_logits(lesson)
    assert len(guesses) == NUM_POSITIONS
    for root in range(9):  # the draft after token root + 1, which is the one that was not drawn yet
        size = root + 1 + NUM_POSITIONS
        seen = torch.ones(size, size).tril().bool()
        seen[root + 1 :, root + 1 :] = True
        canvas = torch.tensor([[*text[: root + 1], *[mask] * NUM_POSITIONS]])
        rows = student.module(input_ids=canvas, attention_mask=seen[None, None]).logits[0, root + 1 :]
        for position, expected in enumerate(rows):
            assert torch.allclose(guesses[position][0, root], expected, atol=1e-5), (root, position)


@torch.no_grad()
def test_the_masks_of_all_roots_at_once_are_each_roots_canvas_alone():
    student = make_tiny_student("parallel-draft")
    shaken(student.module)
    lesson = student.teacher.lesson(windows(rows=1))
    guesses = student.position_logits(lesson)
    for root in range(9):
        canvas = [*lesson.token_ids[0, : root + 2].tolist(), *[VOCAB_SIZE] * (NUM_POSITIONS - 1)]
        rows = student.module(input_ids=torch.tensor([canvas])).logits[0, root + 1 :, :VOCAB_SIZE]
        for position, expected in enumerate(rows):
            assert torch.allclose(guesses[position][0, root], expected, atol=1e-5), (root, position)


@torch.no_grad()
def test_the_blocks_of_all_roots_at_once_are_each_roots_block_alone():
    student = make_tiny_student("dflash")
    shaken(student.module)
    lesson = student.teacher.lesson(windows(rows=1))
    guesses = student.position_logits(lesson)
    for root in range(9):
        rows = slow_block(student.module, lesson.token_ids[0, : root + 2].tolist(), lesson.states[0])[1:]
        for position, expected in enumerate(rows):
            assert torch.allclose(guesses[position][0, root], expected, atol=1e-4), (root, position)


@torch.no_grad()
@pytest.mark.parametrize("method", ["parallel-draft", "dflash"])
def test_a_run_of_roots_learns_what_all_roots_are_judged_by(method):
    student = make_tiny_student(method)
    shaken(student.module)
    short = student.teacher.lesson(windows())
    assert torch.allclose(student.loss(short), position_loss(student, short, Objective.CE))
    lesson = student.teacher.lesson(windows(rows=1, window=MAX_SPAN + 10))
    num_too_many = 10 - student.num_positions
    torch.manual_seed(1)
    first = int(torch.randint(num_too_many + 1, ()))
    assert first > 0
    law = lesson.law(None, start=first)
    rows = [part[:, first : first + MAX_SPAN] for part in student.position_logits(lesson)]
    expected = draft_loss(rows, law)
    torch.manual_seed(1)
    assert student.loss(lesson).item() == pytest.approx(expected.item(), rel=1e-5)


def test_an_adapted_model_has_a_mask_of_its_own_and_keeps_it(tmp_path):
    student = make_tiny_student("parallel-draft")
    assert student.module.config.pard_token == VOCAB_SIZE < student.module.config.vocab_size
    student.save(tmp_path / "adapted")
    adapted = DraftModelStudent.load(tmp_path / "adapted", make_teacher(), build_tokenizer(), num_positions=2)
    size = adapted.module.config.vocab_size
    again = ParallelStudent(adapted)
    assert (again.module.config.pard_token, again.module.config.vocab_size) == (VOCAB_SIZE, size)
    assert [rows.shape[-1] for rows in again.position_logits(again.teacher.lesson(windows()))] == [VOCAB_SIZE] * 2


@pytest.mark.parametrize("method", ["dflash", "tidar"])
def test_the_mask_of_a_block_drafter_is_a_token_that_the_text_has_least_often(method):
    counts = make_corpus().training.counts(VOCAB_SIZE)
    assert counts[make_tiny_student(method).module.config.mask_token_id] == counts.min()


def test_a_head_borrows_the_targets_layers_and_its_vocabulary_is_the_frequent_one():
    student = eagle3_student(
        make_teacher(), make_corpus().training, shape=Eagle3Shape(draft_vocab_size=50), num_positions=1, seed=0
    )
    head, target = student.module, student.teacher.model.model
    assert torch.equal(head.midlayer.mlp.up_proj.weight, target.layers[3].mlp.up_proj.weight)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, :64], target.layers[0].self_attn.q_proj.weight)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 64:], target.layers[3].self_attn.q_proj.weight)
    counts = make_corpus().training.counts(VOCAB_SIZE)
    left_out = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, student.vocab_ids, False)
    assert int(counts[student.vocab_ids].min()) >= int(counts[left_out].max())
    assert head.borrowed == {"embed_tokens.weight"}


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen3", "opt"])
def test_targets_of_other_families_get_a_head_too(model_type, tmp_path):
    teacher = Teacher(make_model(model_type, num_hidden_layers=4, n_layer=4, vocab_size=VOCAB_SIZE))
    student = eagle3_student(
        teacher, make_corpus().training, shape=Eagle3Shape(draft_vocab_size=50), num_positions=2, seed=0
    )
    for other in (student, make_student(options_for("dflash", tmp_path), teacher, build_tokenizer(), make_corpus())):
        assert torch.isfinite(other.loss(other.teacher.lesson(windows())))
    student.save(tmp_path)
    head = Eagle3Head.from_folder(tmp_path, target=StateDictSource(dict(teacher.model.state_dict())))
    assert torch.allclose(head.embed_tokens.weight, teacher.embedding, atol=2e-3)


def test_a_medusa_head_begins_as_the_targets_own_output():
    student = MedusaStudent.create(make_teacher(), make_corpus().training, shape=MedusaShape(), num_heads=2, seed=0)
    lesson = student.teacher.lesson(windows())
    for rows in student.position_logits(lesson):
        assert torch.allclose(rows, lesson.logits()[:, :10], atol=1e-4)


def rows_of(logits, counted=True):
    """Return a lesson of which the target's rows are these."""
    shape = logits.shape[:2]
    return TaughtLesson(
        token_ids=torch.zeros(shape, dtype=torch.long),
        final=logits,
        likeliest=logits.argmax(-1),
        states=torch.zeros(*shape, 0),
        counted=torch.tensor(counted).expand(shape),
    )


def test_rows_whose_likeliest_token_cannot_be_drafted_teach_nothing():
    target = torch.tensor([[[0.2, 0.2, 0.6], [0.3, 0.6, 0.1]]]).log()
    law = rows_of(target).law(torch.tensor([0, 1]))
    assert law.counted.tolist() == [[False, True]]
    draft = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])  # wrong in the row that does not count
    expected = (1 / 3) * torch.tensor(2 / 3).log() + (2 / 3) * torch.tensor(4 / 3).log()
    assert Objective.CE.mean_loss(law.beside(draft, 0)).item() == pytest.approx(expected.item(), abs=1e-5)


def test_what_a_user_says_teaches_nothing():
    target = torch.tensor([[[0.4, 0.6], [0.3, 0.7]]]).log()
    law = rows_of(target, [[False, True]]).law(None)
    draft = torch.tensor([[[9.0, 0.0], [0.3, 0.7]]])
    expected = Objective.CE.mean_loss(rows_of(target[:, 1:]).law(None).beside(draft[:, 1:], 0))
    assert Objective.CE.mean_loss(law.beside(draft, 0)).item() == pytest.approx(expected.item(), abs=1e-6)
    assert expected.item() > 0
    # a window's row counts where the token after it does
    lesson = make_teacher().lesson(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, False, True, True]]))
    assert lesson.counted.tolist() == [[False, True, True, True]]


def test_the_taps_are_the_inputs_of_layers_and_what_the_output_embedding_sees():
    teacher = make_teacher().tapping((2, FINAL_TAP))
    inputs: dict = {}
    hook = teacher.model.model.layers[2].register_forward_pre_hook(lambda _, args: inputs.update(hidden=args[0]))
    lesson = teacher.lesson(windows())
    hook.remove()
    assert torch.equal(lesson.states[..., :64], inputs["hidden"])
    assert torch.allclose(lesson.states[..., 64:] @ teacher.head.T, lesson.logits(), atol=1e-5)
    assert FIRST_DRAFTED_ROW == 1


def test_default_taps_are_the_authors_unless_they_collide():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(6) == (1, 3, 5)
    with pytest.raises(ValueError, match="taps: 6 is no layer of a target with 6 layers"):
        check_taps((1, 6), 6)


def test_unrolled_attention_is_causal_over_the_first_step_alone():
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 4, 8, generator=generator)
    deep = torch.tensor([0, 2])
    attend = UnrolledAttention(deep)
    attend(query, key[:, :1], value[:, :1])  # [rows, 1 kv head]: both query heads share it
    second = attend(query[:, :, deep], key[:, 1:, deep], value[:, 1:, deep])  # [1, 2, 2, 8]
    root = 2
    keys = torch.cat([key[0, 0, : root + 1], key[0, 1, root : root + 1]])
    values = torch.cat([value[0, 0, : root + 1], value[0, 1, root : root + 1]])
    for head in range(2):
        weights = (query[0, head, root] @ keys.T / 8**0.5).softmax(-1)
        assert torch.allclose(second[0, 1, head], weights @ values, atol=1e-6)


@torch.no_grad()
def test_deeper_steps_of_some_roots_are_those_of_all():
    student = random_eagle3()
    lesson = student.teacher.lesson(windows())
    every = student.position_logits(lesson)
    deep = torch.tensor([1, 4, 7])
    some = student._unroll(lesson, deep)
    assert torch.equal(some[0], every[0])
    for ours, theirs in zip(some[1:], every[1:], strict=True):
        assert torch.allclose(ours, theirs[:, deep], atol=1e-5)


def test_the_loss_of_some_roots_is_held_against_their_own_rows():
    logits = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    law = rows_of(logits).law(None)
    deep = torch.tensor([0, 2])
    right = [logits[:, 1:4], logits[:, 2 + deep], logits[:, 3 + deep]]
    assert draft_loss(right, law, deep=deep).item() == pytest.approx(0.0, abs=1e-6)
    assert draft_loss([right[0], right[2], right[1]], law, deep=deep).item() > 0.1
