"""The audit is right about losses whose field is known, refuses what it cannot audit, and reads well."""

import json
import math
import re
import runpy
import subprocess
import sys
import types

import pytest
import torch

from klnb import cli, kl_loss, paths
from klnb.auditing import FROM_MU, INVERSE, LENGTH, TO_MU, AuditError, audit, audit_reward
from klnb.estimators import k1, k2, k3

K = {"k1": k1, "k2": k2, "k3": k3}


def total(terms, mask):
    """The aggregation that keeps the identities: sum over tokens, mean over sequences."""
    return (terms * mask).sum(1).mean()


def named(name, behavior=False, group_size=None):
    def fn(logp, ref_logp, mask, behavior_logp):
        more = {"behavior_logp": behavior_logp} if behavior else {}
        return kl_loss(name, logp, ref_logp, mask, group_size=group_size, **more)

    return fn


def rao_blackwell(logp, ref_logp, mask, behavior_logp, logits, ref_logits):
    return kl_loss("rao-blackwell", logp, ref_logp, mask, logits=logits, ref_logits=ref_logits)


def plain(term):
    """A loss from term(logp, ref_logp, behavior_logp) per token."""
    return lambda logp, ref_logp, mask, behavior_logp: total(term(logp, ref_logp, behavior_logp), mask)


def follows(report, **where):
    """What the rows of some cases follow, if they agree."""
    (only,) = {r["follows"] for r in report.rows if all(r[k] == v for k, v in where.items())}
    return only


# ---- every kl_loss name (what each follows)
ON_POLICY = {
    "k1": "zero", "k2": "R_tok", "k3": "F_tok", "score": "R_tok", "sequence": "R_seq", "reward-to-go": "R_seq",
    "reward-to-go-k3": "R_seq",
}  # fmt: skip


@pytest.mark.parametrize("name", ON_POLICY)
def test_each_name_on_policy(name):
    report = audit(named(name), expect=ON_POLICY[name])
    assert report.holds and len(report.rows) == 6
    for row in report.rows:
        assert row["follows"] == ON_POLICY[name] and row["residual"] == 0
        assert row["coefficients"] == ({} if name == "k1" else {ON_POLICY[name]: 1})
    assert "nothing to change" in report.advice


@pytest.mark.parametrize("name, field", [("k2", "R_seq"), ("k3", "F_seq"), ("reward-to-go", "R_tok"), ("k2", "zero")])
def test_a_neighbouring_field_is_refused(name, field):
    with pytest.raises(AuditError):
        audit(named(name), expect=field)


def test_rao_blackwell_is_handed_the_logits_it_asks_for():
    assert audit(rao_blackwell, expect="R_seq").holds


@pytest.mark.parametrize("name", ["sequence", "reward-to-go", "reward-to-go-k3"])
def test_corrected_names_off_policy(name):
    assert audit(named(name, behavior=True), expect="R_seq", off_policy=True).holds


def test_without_the_ratios_a_name_is_right_on_policy_only():
    with pytest.raises(AuditError) as e:
        audit(named("reward-to-go"), expect="R_seq", off_policy=True)
    assert [r["holds"] for r in e.value.report.rows] == [True] * 6 + [False] * 6


@pytest.mark.parametrize(
    "name, size, off_policy",
    [("sequence", 2, False), ("reward-to-go", 2, True), ("reward-to-go-k3", 2, False), ("reward-to-go", 3, False)],
)
def test_leave_one_out_in_batches(name, size, off_policy):
    assert audit(named(name, off_policy, size), expect="R_seq", off_policy=off_policy, batch_size=size).holds


def test_off_policy_k1_is_the_negative_gradient_to_the_sampler():
    # E_μ[∇log π] = −∇KL(μ‖π): no longer inert
    report = audit(named("k1"), off_policy=True)
    assert follows(report, policy="on-policy") == "zero"
    assert all(r["coefficients"] == {FROM_MU: -1} for r in report.rows if r["policy"] == "off-policy")
    assert report.verdict.startswith("zero") and "off-policy: the NEGATIVE of ∇KL(μ‖π)" in report.verdict
    with pytest.raises(AuditError):
        audit(named("k1"), expect="zero", off_policy=True)
    assert follows(audit(named("k2"), off_policy=True), policy="off-policy") == "none"


# ---- the formulas of libraries, re-expressed
RATIO_TERMS = {  # name: (term, on-policy, off-policy, live ratio)
    "live ratio × k3": (lambda p, q, b: (p - b).exp() * k3(p - q), "R_tok", "R_tok_mu", True),
    "live ratio × k1": (lambda p, q, b: (p - b).exp() * k1(p - q), "R_tok", "R_tok_mu", True),
    "live ratio × k2": (lambda p, q, b: (p - b).exp() * k2(p - q), "none", "none", True),
    "detached ratio × k2": (lambda p, q, b: (p - b).exp().detach() * k2(p - q), "R_tok", "R_tok_mu", False),
    "exp(x − sg x) × k3": (lambda p, q, b: (p - p.detach()).exp() * k3(p - q), "R_tok", "none", True),
    "k3's value, k2's gradient": (lambda p, q, b: (k3(p - q) - k2(p - q)).detach() + k2(p - q), "R_tok", "none", True),
    "straight k3": (lambda p, q, b: k3(p - q), "F_tok", "none", False),
}


@pytest.mark.parametrize("name", RATIO_TERMS)
def test_ratios(name):
    term, on, off, live = RATIO_TERMS[name]
    report = audit(plain(term), off_policy=True)
    assert (follows(report, policy="on-policy"), follows(report, policy="off-policy")) == (on, off)
    assert any("a live ratio" in n for n in report.notes) == live


def test_r_tok_keeps_the_prefixes_of_the_policy_and_r_tok_mu_those_of_the_sampler():
    term = RATIO_TERMS["detached ratio × k2"][0]
    assert audit(plain(term), expect="R_tok_mu", off_policy=True).holds  # on-policy the same as R_tok
    with pytest.raises(AuditError):
        audit(plain(term), expect="R_tok", off_policy=True)


def test_geometric_mean_ratio_mixes_two_fields():
    # w = exp(mean_t(log π − log π_old)), live, at fixed T: k3 differentiated once, plus k3_s ∇log π_t / T for every s
    # and t: F_tok + (R_seq − F_tok)/T
    def fn(logp, ref_logp, mask, behavior_logp):
        log_w = ((logp - behavior_logp) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return total(log_w.exp() * k3(logp - ref_logp), mask)

    rows = [r for r in audit(fn).rows if r["length"] == "fixed"]
    for row in rows:
        assert row["coefficients"] == pytest.approx({"R_seq": 1 / 3, "F_tok": 2 / 3}, rel=1e-5) and row["residual"] == 0


def test_whole_sequence_k2_and_k3():
    def whole(k):
        return lambda logp, ref_logp, mask, behavior_logp: k(((logp - ref_logp) * mask).sum(1)).mean()

    assert audit(whole(k2), expect="R_seq").holds
    assert audit(whole(k3), expect="F_seq").holds
    assert audit(whole(k1), expect="zero").holds


def test_a_clamp_shows_far_away_only_and_says_where():
    # k3's value clamped at 10: e^x − 1 − x = 10 at x = −ℓ = 2.61, and at ℓ = 11.00, where e^(−ℓ) is nothing
    clamped = plain(lambda p, q, b: k3((p - q).clamp(-20, 20)).clamp(max=10))
    report = audit(clamped)
    assert follows(report, pairs="near") == "F_tok" and follows(report, pairs="far") == "none"
    assert "near π_ref" in report.verdict and "far from π_ref" in report.verdict
    where = "a clamp: the gradient of one token is that of k3, but not below ℓ = -2.61 and above ℓ = 11.00"
    assert where in report.notes
    with pytest.raises(AuditError):
        audit(clamped, expect="F_tok")
    narrow = audit(plain(lambda p, q, b: k2((p - q).clamp(-10, 10))))
    assert any("that of k2, but not below ℓ = -10.00 and above ℓ = 10.00" in n for n in narrow.notes)
    assert not any("clamp" in n for n in audit(named("k2")).notes)


def test_scale_and_sign():
    report = audit(lambda *a: 1e-3 * named("k2")(*a), expect="R_tok")
    assert all(r["coefficient"] == pytest.approx(1e-3, rel=1e-5) for r in report.rows)
    with pytest.raises(AuditError) as e:  # proportional, but the wrong way
        audit(lambda *a: -40 * named("k2")(*a), expect="R_tok")
    assert e.value.report.verdict.startswith("the NEGATIVE of token-level KL(π‖π_ref)")
    assert any("sign flip" in n for n in e.value.report.notes)


# ---- aggregation
def per_sequence_mean(k):
    return lambda logp, ref_logp, mask, behavior_logp: ((k(logp - ref_logp) * mask).sum(1) / mask.sum(1)).mean()


def test_per_sequence_mean_of_k1_is_a_push_on_length():
    # E[(1/L) Σ_t ∇log π_t] = E[(1/L) ∇log π(y)] = ∇E[1/L] exactly; with one length only, zero
    report = audit(per_sequence_mean(k1))
    assert follows(report, length="fixed") == "zero"
    assert all(r["coefficients"] == {INVERSE: 1} for r in report.rows if r["length"] == "variable")
    assert any("each sequence's own length" in n for n in report.notes)
    assert any("push on length" in n for n in report.notes)
    with pytest.raises(AuditError):
        audit(per_sequence_mean(k1), expect="zero")


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_per_sequence_mean_of_others(name):
    report = audit(per_sequence_mean(K[name]))
    assert all(
        r["coefficients"] == pytest.approx({ON_POLICY[name]: 1 / 3}, rel=1e-5)  # T = 3
        for r in report.rows
        if r["length"] == "fixed"
    )
    assert follows(report, length="variable") == "none"
    assert any("each sequence's own length" in n and ON_POLICY[name] in n for n in report.notes)


def test_token_mean_of_a_batch():
    def fn(logp, ref_logp, mask, behavior_logp):
        return (k3(logp - ref_logp) * mask).sum() / mask.sum()

    report = audit(fn, batch_size=2)
    assert follows(report, length="fixed") == "F_tok" and follows(report, length="variable") == "none"
    assert any("all tokens of the batch" in n and "F_tok" in n for n in report.notes)
    with pytest.raises(AuditError):
        audit(fn, expect="F_tok", batch_size=2)


@pytest.mark.parametrize("name", ["k1", "k3"])
@pytest.mark.parametrize("size", [1, 2])
def test_mean_that_counts_padding(name, size):
    report = audit(lambda p, q, mask, b: (K[name](p - q) * mask).mean(), batch_size=size)
    assert follows(report, padding="T") == follows(report, padding="none") == ON_POLICY[name]
    assert follows(report, padding="longest row") == (INVERSE if (name, size) == ("k1", 1) else "none")
    assert any("counts padding" in n for n in report.notes)


def test_a_mean_that_counts_padding_meets_no_expectation():
    with pytest.raises(AuditError):  # right when padded to T, and still not right
        audit(lambda p, q, mask, b: (k3(p - q) * mask).mean(), expect="F_tok")


def test_padding_that_leaks():
    report = audit(lambda p, q, mask, b: k2(p - q).sum(1).mean())
    assert follows(report, padding="longest row") == "R_tok" and follows(report, padding="T") == "none"
    assert any("padding reaches the gradient" in n for n in report.notes)


def test_a_push_on_length():
    # E[L ∇log π(y)] = ∇E[L]
    report = audit(lambda p, q, mask, b: (mask.sum(1) * (p * mask).sum(1)).mean())
    assert follows(report, length="fixed") == "zero"
    assert all(r["coefficients"] == {LENGTH: 1} for r in report.rows if r["length"] == "variable")


# ---- KL in the reward
def test_reward_discounts():
    def penalty(logp, ref_logp, mask, behavior_logp):
        assert not logp.requires_grad
        return logp - ref_logp

    assert audit_reward(penalty, expect="R_seq").holds
    assert audit_reward(penalty, discount=0.0, expect="R_tok").holds
    assert follows(audit_reward(penalty, discount=0.5)) == "none"


def test_reward_to_go_as_an_advantage():
    def advantage(logp, ref_logp, mask, behavior_logp):
        return -((logp - ref_logp) * mask).flip(1).cumsum(1).flip(1)

    assert audit_reward(advantage, returns="advantage", expect="R_seq").holds
    with pytest.raises(AuditError) as e:
        audit_reward(lambda *a: -advantage(*a), returns="advantage", expect="R_seq")
    assert any("sign flip" in n for n in e.value.report.notes)


def test_reward_off_policy():
    # E_μ[w_{1:T} ℓ(y) ∇log π(y)] = R_seq; with log μ for log π (frozen at rollout): R_seq − E_π[log(π/μ) ∇log π]
    live, frozen = (lambda p, q, m, b: p - q), (lambda p, q, m, b: b - q)
    assert audit_reward(live, ratio="sequence", off_policy=True, expect="R_seq").holds
    report = audit_reward(frozen, ratio="sequence", off_policy=True)
    assert follows(report, policy="on-policy") == "R_seq"
    for row in report.rows:
        if row["policy"] == "off-policy":
            assert row["coefficients"] == pytest.approx({"R_seq": 1, TO_MU: -1}, rel=1e-5)
    for ratio in (None, "token"):
        assert follows(audit_reward(live, ratio=ratio, off_policy=True), policy="off-policy") == "none"


def test_centred_penalties():
    # a constant c off every penalty: −c Σ_t ∇log π_t (L − t + 1), and E of that is −c ∇E[L]
    report = audit_reward(lambda p, q, m, b: p - q - 0.7)
    assert follows(report, length="fixed") == "R_seq"
    for row in report.rows:
        if row["length"] == "variable":
            assert row["coefficients"] == pytest.approx({"R_seq": 1, LENGTH: -0.7}, rel=1e-5)
    assert any("push on length" in n for n in report.notes)

    def batch_centred(logp, ref_logp, mask, behavior_logp):
        return logp - ref_logp - ((logp - ref_logp) * mask).sum() / mask.sum()

    report = audit_reward(batch_centred, batch_size=2)  # the mean contains the row itself: O(1/N) off
    assert follows(report) == "none"


def test_group_normalised_reward_is_no_field():
    def fn(logp, ref_logp, mask, behavior_logp):
        score = -((logp - ref_logp) * mask).sum(1)
        return ((score - score.mean()) / (score.std() + 1e-4))[:, None].expand_as(logp)

    assert follows(audit_reward(fn, returns="advantage", batch_size=2), length="fixed") == "none"


def test_reward_may_ask_for_logits():
    def fn(logp, ref_logp, mask, behavior_logp, logits, ref_logits):
        p, q = logits.log_softmax(2), ref_logits.log_softmax(2)
        return (p.exp() * (p - q)).sum(2)

    # Σ_t ∇log π_t Σ_{s≥t} KL_s: the s = t term has mean zero, so it is R_seq − R_tok
    for row in audit_reward(fn).rows:
        assert row["coefficients"] == pytest.approx({"R_seq": 1, "R_tok": -1}, rel=1e-5)


# ---- what cannot be audited
def random(logp, ref_logp, mask, behavior_logp):
    return total(k2(logp - ref_logp) * torch.rand(()), mask)


BAD = {  # name: (fn, part of the message)
    "detached": (lambda p, q, m, b: total(k2(p.detach() - q), m), "no gradient"),
    "no_grad": (torch.no_grad()(lambda p, q, m, b: total(k2(p - q), m)), "no gradient"),
    "shape": (lambda p, q, m, b: k2(p - q).sum(1, keepdim=True).expand(-1, 2), r"scalar tensor, got shape \[1, 2\]"),
    "none": (lambda p, q, m, b: None, "scalar tensor, got NoneType"),
    "nan": (lambda p, q, m, b: total(k2(p - q), m) * math.nan, "finite value, got nan"),
    "inf": (lambda p, q, m, b: total((p - q).exp().exp(), m), r"finite value, got inf.*far"),  # overflows far away only
    "nan gradient": (lambda p, q, m, b: total((p - p).sqrt() + k2(p - q), m), "its gradient is NaN"),
    "random": (random, "two calls on the same input differ"),
    "arguments": (lambda logp, ref_logp: total(k2(logp - ref_logp), 1), "expected a function fn"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_functions(name):
    fn, message = BAD[name]
    with pytest.raises(ValueError, match=message) as e:
        audit(fn)
    assert "\n" not in str(e.value)


def test_bad_options():
    for options, message in (
        ({"expect": "R_tk"}, "expect: expected one of R_seq"),
        ({"batch_size": 4}, "batch_size: expected 1, 2 or 3"),
    ):
        with pytest.raises(ValueError, match=message):
            audit(named("k2"), **options)
    with pytest.raises(ValueError, match="returns"):
        audit_reward(named("k2"), returns="rewards")
    with pytest.raises(ValueError, match="ratio"):
        audit_reward(named("k2"), ratio="prefix")
    with pytest.raises(ValueError, match=r"reward: expected a tensor of shape \[1, 3\], got shape \[1\]"):
        audit_reward(lambda p, q, m, b: (p - q).sum(1))


def test_float32_losses_need_a_wider_tolerance():
    def single(name):
        return lambda p, q, m, b: kl_loss(name, p.float(), q.float(), m)

    with pytest.raises(AuditError) as e:
        audit(single("k2"), expect="R_tok", rtol=1e-9)
    assert any("float32" in n for n in e.value.report.notes)
    assert audit(single("k2"), expect="R_tok", rtol=1e-4).holds
    assert audit(single("k1"), expect="zero", rtol=1e-3).holds


# ---- the report
def test_report_reads_well():
    report = audit(named("k2"), off_policy=True)
    text = str(report)
    assert audit(named("k2")).verdict == "token-level KL(π‖π_ref) with prefixes frozen: a partial gradient"
    assert text.splitlines()[0] == report.verdict
    assert text.count("near") == text.count("far") == 6 and "residual" in text
    assert 'klnb.kl_loss("reward-to-go", logp, ref_logp, mask, behavior_logp=behavior_logp)' in report.advice
    page = report._repr_html_()
    assert page.count("<tr>") == 13 and page.count("<th>") == 6 and "&lt;" not in report.verdict
    again = json.loads(json.dumps(report.to_dict()))
    assert again["verdict"] == report.verdict and again["rows"][0]["coefficients"] == {"R_tok": 1.0}
    with pytest.raises(AssertionError, match="expected F_tok, found token-level") as e:
        audit(per_sequence_mean(k3), expect="F_tok")
    assert "does NOT hold" in str(e.value) and str(e.value.report) in str(e.value)


def test_the_coefficient_may_differ_between_cases_and_its_range_is_printed():
    def fn(logp, ref_logp, mask, behavior_logp):
        stale = not torch.equal(logp.detach(), behavior_logp)
        return total((logp - behavior_logp).exp() * k3(logp - ref_logp), mask) * (2 if stale else 1)

    report = audit(fn, expect="R_tok_mu", off_policy=True)
    assert "expected R_tok_mu: holds, coefficient from 1 to 2" in str(report)


def test_same_report_every_time():
    state = torch.random.get_rng_state()
    first = audit(named("reward-to-go"), off_policy=True)
    torch.rand(7)
    torch.random.set_rng_state(state)
    assert str(audit(named("reward-to-go"), off_policy=True)) == str(first)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody's random numbers are used up


# ---- the command line
MODULE = '''
import torch
from klnb import kl_loss
print("loading")
def right(logp, ref_logp, mask, behavior_logp):
    return kl_loss("reward-to-go", logp, ref_logp, mask, behavior_logp=behavior_logp)
def partial(logp, ref_logp, mask, behavior_logp):
    return kl_loss("k2", logp, ref_logp, mask)
def pair(logp, ref_logp, mask, behavior_logp):
    return kl_loss("reward-to-go", logp, ref_logp, mask, group_size=2)
def detached(logp, ref_logp, mask, behavior_logp):
    return logp.detach().sum()
def broken(logp, ref_logp, mask, behavior_logp):
    raise RuntimeError("first line\\nsecond line")
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "trainer_kl.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    sys.modules.pop("trainer_kl", None)


def test_command_line_prints_the_report(project, capsys):
    assert cli.main(["audit", "trainer_kl:partial"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "token-level KL(π‖π_ref) with prefixes frozen: a partial gradient"
    assert cli.main(["audit", "trainer_kl:right", "--expect", "R_seq", "--off-policy", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is True and len(report["rows"]) == 12
    assert cli.main(["audit", "trainer_kl:pair", "--batch-size", "2", "--expect", "R_seq"]) == 0


def test_command_line_exit_statuses(project, capsys):
    assert cli.main(["audit", "trainer_kl:partial", "--expect", "R_seq"]) == 1
    shown = capsys.readouterr()
    assert "does NOT hold" in shown.out and "expected R_seq, found token-level" in shown.err
    for target, message in (
        ("trainer_kl:detached", "no gradient"), ("trainer_kl:missing", "no attribute"), ("nowhere:f", "No module"),
        ("trainer_kl", "package.module:function"), ("trainer_kl:broken", "RuntimeError: first line second line"),
        ("trainer_kl:pair", "group_size"),
    ):  # fmt: skip
        capsys.readouterr()
        assert cli.main(["audit", target]) == 2, target
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 + ("loading" in shown.err) and not shown.out
    assert cli.main(["audit", "trainer_kl:right", "--expect", "R"]) == 2
    with pytest.raises(SystemExit) as e:
        cli.main(["audit", "--help"])
    assert e.value.code == 0 and "--off-policy" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        cli.main(["audit", "trainer_kl:right", "--nonsense"])
    assert e.value.code == 2


def test_command_line_finds_the_module_in_the_current_folder(project):
    run = subprocess.run(
        [sys.executable, "-m", "klnb.cli", "audit", "trainer_kl:partial", "--expect", "R_seq"],
        cwd=project, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1 and "does NOT hold" in run.stdout


# ---- the libraries: what runs without them (the rest is tests_audit/)
def test_the_published_audit_is_complete():
    libraries = runpy.run_path(str(paths.ROOT / "examples/audit_libraries.py"))
    published = json.loads((paths.PUBLISHED / "audit.json").read_text())
    known = {"made_by", "commit", "date", "versions", "python", "device", "dtype", "seed", "code_sha256", "code"}
    assert set(published["provenance"]) == known | {"params_sha256"} and all(published["provenance"].values())
    rows = {(r["library"], r["version"], r["option"], r["source"]): r for r in published["rows"]}
    assert len(rows) == len(published["rows"])
    expected = {(t.library, t.version, t.option, t.source): (t.on, t.off) for t in libraries["TERMS"]}
    assert {k: (r["on_policy"], r["off_policy"]) for k, r in rows.items()} == expected


def test_the_example_on_the_page_what_to_set(monkeypatch):
    page = (paths.ROOT / "site/what_to_set.md").read_text()
    (example,) = re.findall(r"^```python\n(import klnb\nimport pytest.*?)^```", page, re.S | re.M)
    trainer = types.ModuleType("my_trainer")
    trainer.kl_term = named("reward-to-go", behavior=True)
    monkeypatch.setitem(sys.modules, "my_trainer", trainer)
    names = {}
    exec(example, names)
    tests = [f for n, f in names.items() if n.startswith("test_")]
    for test in tests:
        test()
    trainer.kl_term = named("k2")
    with pytest.raises(AuditError):
        exec(example, names)
        names["test_the_kl_term_follows_the_kl"]()
