"""Evidence that is no distribution is found, and what rounding makes of one is not."""

import pytest
import torch

from offdrift.errors import RecordError
from offdrift.records import store
from offdrift.records.plausible import implausible
from offdrift.records.rollouts import FullVocab, TopK
from tests.records.samples import rollouts


def drawn(vocabulary: int, scale: float, seed: int = 0, n: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of float32 logits, drawn tokens and their log-probs."""
    torch.manual_seed(seed)
    logp = (torch.randn(n, vocabulary) * scale).log_softmax(-1)
    tokens = torch.multinomial(logp.exp(), 1)[:, 0]
    return logp, tokens, logp.gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("vocabulary", [2, 1000, 151_936])
def test_what_rounding_makes_of_a_distribution_passes(vocabulary: int, scale: float, dtype: torch.dtype) -> None:
    logp, tokens, own = (x.to(dtype).float() if x.is_floating_point() else x for x in drawn(vocabulary, scale))
    assert implausible(FullVocab(logp), tokens, own) is None
    top = logp.topk(min(20, vocabulary))
    assert implausible(TopK(top.indices.int(), top.values), tokens, own) is None


def test_logits_in_half_precision_are_distributions() -> None:
    torch.manual_seed(0)
    logp = (torch.randn(8, 32_000) * 5).bfloat16().log_softmax(-1, dtype=torch.float32)
    tokens = logp.argmax(-1)
    assert implausible(FullVocab(logp), tokens, logp.amax(-1)) is None


@pytest.mark.parametrize("total", [4.0, 1.01, 0.99, 0.04, float("nan")])
def test_one_token_that_sums_to_something_else_is_found(total: float) -> None:
    logp, tokens, own = drawn(1000, 1.0, n=40)
    by = torch.tensor(total).log()
    logp[33] += by
    own = own.clone()
    own[33] += by
    at, why = implausible(FullVocab(logp), tokens, own)  # type: ignore[misc]
    assert at == 33
    assert "1000 probabilities sum to" in why


def test_a_top_k_is_checked_with_the_drawn_token_that_it_leaves_out() -> None:
    ids, half = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.5, 0.4]]).log()
    none = torch.tensor([0.05]).log()
    assert implausible(TopK(ids, half), torch.tensor([0]), none) is None
    assert "sum to 1.2" in implausible(TopK(ids, half), torch.tensor([0]), torch.tensor([0.3]).log())[1]  # type: ignore[index]
    likelier = torch.tensor([[0.5, 0.01]]).log()
    assert "likelier than the last" in implausible(TopK(ids, likelier), torch.tensor([0]), none)[1]  # type: ignore[index]
    assert "twice" in implausible(TopK(ids * 0, half), torch.tensor([0]), half[:, 0])[1]  # type: ignore[index]
    assert "in order" in implausible(TopK(ids, half.flip(1)), torch.tensor([0]), none)[1]  # type: ignore[index]
    assert "two log-probs" in implausible(TopK(ids, half), torch.tensor([1]), none)[1]  # type: ignore[index]


def test_unscored_tokens_are_not_compared() -> None:
    half = torch.tensor([[0.5, 0.5]]).log()
    assert implausible(FullVocab(half), torch.tensor([0]), torch.tensor([float("nan")])) is None


def test_stored_evidence_is_checked(tmp_path) -> None:
    batch = rollouts()
    n = len(batch.tokens)
    logp = torch.full((n, 200), 1 / 200).log()
    logp[:] -= 0.5
    spoiled = batch.with_(evidence=FullVocab(logp), logp_rollout=logp.gather(1, batch.tokens.long()[:, None])[:, 0])
    with pytest.raises(RecordError, match=r"token 0: its 200 probabilities sum to 0\.6065"):
        store.read(store.write(spoiled, tmp_path / "a.parquet"))
