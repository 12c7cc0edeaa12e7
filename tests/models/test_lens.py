"""The mean Jacobian of a language model from a layer to the end, against the public formula by autograd."""

import json

import pytest
import torch
from benchmarks.gpu_lens import rows_by_autograd
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import howsmooth as hs
from howsmooth.models.lens import Lens, behind

AT = torch.arange(16, 29)


def llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=100, max_position_embeddings=64)  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def gpt():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def prompts(count=1, n=30):
    return torch.randint(100, (count, n), generator=torch.Generator().manual_seed(5)).tolist()


def public(module, blocks, ids, last=None):
    last = len(blocks) - 1 if last is None else last
    return rows_by_autograd(module, blocks[: last + 1], torch.tensor([ids]), list(range(last)), AT)


@pytest.mark.parametrize("build", [llama, gpt])
def test_one_prompt_is_the_public_formula(build):
    module = build()
    blocks = list(module.model.layers if build is llama else module.transformer.h)
    (ids,) = prompts()
    lens, want = hs.load(module, device="cpu").mean_jacobian([ids]), public(module, blocks, ids)
    assert lens.source_layers == list(want)
    for k, J in want.items():
        assert float((lens[k] - J).norm()) <= 1e-5 * float(J.norm())


def test_layers_ends_and_positions_are_chosen():
    module, (ids,) = llama(), prompts()
    model = hs.load(module, device="cpu")
    lens = model.mean_jacobian([ids], layers=[1], to=2)
    torch.testing.assert_close(lens[1], public(module, list(module.model.layers), ids, last=2)[1], rtol=1e-4, atol=1e-5)
    # one position at both ends is a block of the Jacobian
    J = hs.jacobian(model.capture(ids=ids).map(3, "block", to="final"), model.capture(ids=ids).tokens(3, "block")).dense()
    block = J.reshape(30, 32, 30, 32)[20, :, 20]
    torch.testing.assert_close(model.mean_jacobian([ids], layers=[2], positions=[20])[2], block, rtol=1e-4, atol=1e-5)


def test_the_mean_its_error_and_a_mean_that_no_prompt_dominates():
    model, given = hs.load(llama(), device="cpu"), prompts(5)
    one = [model.mean_jacobian([ids])[0].double() for ids in given]
    lens = model.mean_jacobian(given)
    stack = torch.stack(one)
    torch.testing.assert_close(lens[0].double(), stack.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lens.error(0).double(), stack.std(0) / 5**0.5, rtol=1e-3, atol=1e-6)
    norms = stack.flatten(1).norm(dim=1)
    assert lens.norms[0] == pytest.approx(norms.tolist(), rel=1e-5)
    robust = (stack / norms[:, None, None]).mean(0) * norms.median()
    torch.testing.assert_close(lens.robust()[0].double(), robust, rtol=1e-4, atol=1e-6)
    share = norms.square() / norms.square().sum()
    assert [i for i, _ in lens.dominant(0)] == [i for i in share.argsort(descending=True).tolist() if share[i] > 0.1]
    assert torch.isinf(model.mean_jacobian(given[:1]).error(0)).all()
    assert repr(lens) == "Lens(LlamaForCausalLM, layers 0 to 2 → final, 32 × 32, 5 prompts)"


def test_states_behind_the_last_block_become_the_models_own_logits():
    for module in (llama(), gpt()):
        model, (ids,) = hs.load(module, device="cpu"), prompts()
        base = module.model if isinstance(module, LlamaForCausalLM) else module.transformer
        left = {}
        blocks = base.layers if hasattr(base, "layers") else base.h
        hook = blocks[-1].register_forward_hook(lambda m, a, o, left=left: left.update(h=o if torch.is_tensor(o) else o[0]))
        logits = module(torch.tensor([ids])).logits[0]
        hook.remove()
        torch.testing.assert_close(behind(model, left["h"][0]), logits, rtol=1e-4, atol=1e-5)
        lens = model.mean_jacobian([ids])
        h = model.capture(ids=ids).tokens(2, "block")  # what leaves block 1
        torch.testing.assert_close(lens.apply(h[None, 3:], 1)[0], behind(model, h[3:] @ lens[1].T), rtol=1e-4, atol=1e-5)


def test_a_lens_is_kept_and_goes_on(tmp_path, monkeypatch):
    model, given, path = hs.load(llama(), device="cpu"), prompts(3), tmp_path / "lens.safetensors"
    whole = model.mean_jacobian(given)
    model.mean_jacobian(given[:2], path=path)
    from howsmooth.models import lens as room

    runs, own = [], room.jacobians
    monkeypatch.setattr(room, "jacobians", lambda *a: runs.append(1) or own(*a))
    again = model.mean_jacobian(given, path=path)
    assert len(runs) == 1  # the third prompt alone
    read = Lens.load(path, model)
    for lens in (again, read):
        torch.testing.assert_close(lens[1], whole[1])
        assert lens.norms[1] == pytest.approx(whole.norms[1])
    with safe_open(path, "pt") as file:
        told = {k: json.loads(v) for k, v in file.metadata().items()}
        assert {"J.0", "J.1", "J.2"} <= set(file.keys())
    assert (told["n_prompts"], told["source_layers"], told["d_model"]) == (3, [0, 1, 2], 32)
    public = read.to_dict()
    assert list(public) == ["J", "n_prompts", "source_layers", "d_model"]
    assert torch.equal(public["J"][2], read[2])
    with pytest.raises(hs.HowSmoothError, match="with other weights or settings; choose another path"):
        hs.load(llama(seed=1), device="cpu").mean_jacobian(given, path=path)
    with pytest.raises(hs.HowSmoothError, match="with other weights or settings"):
        model.mean_jacobian(given, layers=[0], path=path)
    with pytest.raises(hs.HowSmoothError, match=r"expected all prompts of the lens at .* got 2 less"):
        model.mean_jacobian(given[:1], path=path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(hs.HowSmoothError, match=r"expected a lens that Lens\.save wrote"):
        Lens.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["lens.safetensors"]


def test_prompts_that_cannot_count_are_named_and_left_out(monkeypatch):
    model, given = hs.load(llama(), device="cpu"), prompts(2)
    lens = model.mean_jacobian([given[0], given[1][:10]])
    assert (lens.n_prompts, lens.left_out) == (1, ("prompt 1: 10 tokens, too few for the positions",))
    from howsmooth.models import lens as room

    own = room.jacobians
    answers = iter([lambda *a: {k: J * float("nan") for k, J in own(*a).items()}, own])
    monkeypatch.setattr(room, "jacobians", lambda *a: next(answers)(*a))
    assert model.mean_jacobian(given).left_out == ("prompt 0: its Jacobian is not finite",)
    with pytest.raises(hs.HowSmoothError, match="expected a prompt that can be counted, got prompt 0: 5 tokens"):
        model.mean_jacobian([given[0][:5]])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda m, p: m.mean_jacobian([]), "expected a prompt or more, got none"),
        (lambda m, p: m.mean_jacobian(p, layers=[2], to=1), "expected layers before layer 1"),
        (lambda m, p: m.mean_jacobian(p, layers=[3]), "expected layers before layer 3"),
        (lambda m, p: m.mean_jacobian(p, to=7), 'expected "final" or a layer below 4'),
        (lambda m, p: m.mean_jacobian(p, layers=["a"]), "expected a layer, counted from 0"),
        (lambda m, p: m.mean_jacobian(p, n=2.5), "expected a whole number of tokens n"),
        (lambda m, p: m.mean_jacobian(p, positions=[1.0]), "expected whole positions"),
        (lambda m, p: m.mean_jacobian(p)[3], r"expected a layer of the lens, \[0, 1, 2\]"),
        (lambda m, p: m.mean_jacobian(p).apply(torch.zeros(7), 0), r"expected hidden states \(…, 32\), got \(7,\)"),
        (lambda m, p: m.mean_jacobian(p, to=2).apply(torch.zeros(32), 0), "expected a lens to the end of a model"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(ask, said):
    with pytest.raises(hs.HowSmoothError, match=said):
        ask(hs.load(llama(), device="cpu"), prompts())


def test_prompts_of_any_kind_are_cut_alike_and_count_as_often_as_they_come():
    model, (a, b) = hs.load(gpt(), device="cpu"), prompts(2)
    want = model.mean_jacobian([a[:25]])[0]
    for prompt in (a, torch.tensor(a), model.capture(ids=a).window):
        torch.testing.assert_close(model.mean_jacobian([prompt], n=25)[0], want)
    twice = model.mean_jacobian([a, a, b])
    assert twice.n_prompts == 3
    torch.testing.assert_close(twice[0], (2 * model.mean_jacobian([a])[0] + model.mean_jacobian([b])[0]) / 3)
    torch.testing.assert_close(model.mean_jacobian([a], positions=[1, 3, 3])[0], model.mean_jacobian([a], positions=[1, 3])[0])
    assert twice.apply(torch.zeros(100, 32), 0).shape == (100, 100)  # more states than the model has positions
    assert twice.apply(torch.zeros(0, 32), 0).shape == (0, 100)


def test_files_that_are_no_lens_are_refused(tmp_path):
    model, given = hs.load(gpt(), device="cpu"), prompts()
    with pytest.raises(hs.HowSmoothError, match="expected a place to write to"):
        model.mean_jacobian(given, path=tmp_path / "nowhere" / "lens.safetensors")
    for told in ({"source_layers": "[0]"}, {"source_layers": "3"}):
        save_file({f"{name}.0": torch.eye(8) for name in ("J", "squares", "turned")}, tmp_path / "other", told)
        with pytest.raises(hs.HowSmoothError, match=r"expected a lens that Lens\.save wrote"):
            Lens.load(tmp_path / "other")


def test_a_model_without_a_head_says_so():
    model = hs.load(llama().model, device="cpu")
    lens = model.mean_jacobian(prompts())
    with pytest.raises(hs.HowSmoothError, match="expected a model with a head, got LlamaModel"):
        lens.apply(torch.zeros(32), 0)
