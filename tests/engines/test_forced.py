"""Log-probs of given tokens in a server's answers: vLLM's and SGLang's form, and what is refused."""

import copy

import pytest
import torch

from offdrift.engines.server.dialects import forced_request, read_forced
from offdrift.errors import EngineError

TOKENS = [5, 3, 7, 7]
VLLM = {
    "choices": [
        {
            "prompt_logprobs": [
                None,
                {"3": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
                {"7": {"logprob": -1.25, "rank": 2, "decoded_token": "b"}},
                {"7": {"logprob": -9999.0, "rank": 9, "decoded_token": "b"}},
            ]
        }
    ]
}
SGLANG = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 3, None], [-1.25, 7, None], [-9999.0, 7, None]]}}  # fmt: skip


@pytest.mark.parametrize(("api", "answer"), [("completions", VLLM), ("sglang", SGLANG)])
def test_log_probs_of_given_tokens_are_read_from_the_second_on(api, answer):
    expected = torch.tensor([-0.5, -1.25, -torch.inf])
    assert torch.equal(read_forced(api, answer, TOKENS), expected)


def test_a_server_that_leaves_the_first_token_out_is_read_alike():
    answer = {"meta_info": {"input_token_logprobs": SGLANG["meta_info"]["input_token_logprobs"][1:]}}
    assert read_forced("sglang", answer, TOKENS)[0] == -0.5


def test_requests_ask_for_log_probs_of_the_prompt_and_one_token():
    body = forced_request("completions", "m", TOKENS)
    assert (body["prompt_logprobs"], body["max_tokens"], body["prompt"]) == (0, 1, TOKENS)
    body = forced_request("sglang", "m", TOKENS)
    assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"], body["input_ids"]) == (0, 1, TOKENS)


def changed(answer: dict, at: tuple, value: object) -> dict:
    answer = copy.deepcopy(answer)
    holder = answer
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return answer


ROWS = ("meta_info", "input_token_logprobs")


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        ("completions", changed(VLLM, ("choices", 0, "prompt_logprobs"), None)),
        ("completions", changed(VLLM, ("choices", 0, "prompt_logprobs", 2), {"8": {"logprob": -1.0}})),
        ("completions", changed(VLLM, ("choices", 0, "prompt_logprobs", 2), None)),
        ("completions", changed(VLLM, ("choices", 0, "prompt_logprobs", 2, "7"), 3)),
        ("completions", changed(VLLM, ("choices", 0, "prompt_logprobs", 2, "7", "logprob"), "x")),
        ("completions", changed(VLLM, ("choices", 0, "prompt_logprobs", 2, "7", "logprob"), 4.0)),
        ("completions", []),
        ("sglang", changed(SGLANG, (*ROWS, 2), [-1.0, 6, None])),
        ("sglang", changed(SGLANG, (*ROWS, 2), [None, 7, None])),
        ("sglang", changed(SGLANG, ROWS, [])),
        ("sglang", {"meta_info": {}}),
    ],
)
def test_answers_about_other_tokens_or_without_numbers_are_refused(api, answer):
    with pytest.raises(EngineError):
        read_forced(api, answer, TOKENS)
