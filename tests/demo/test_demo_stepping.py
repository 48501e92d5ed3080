"""What the demo says of a step: of events made up, and of every step of a real run."""

from __future__ import annotations

from demo.generation import Sampling
from demo.hub import Hub
from demo.limits import Limits
from demo.loading import load
from demo.stepping import quote


def test_every_step_of_a_real_run_is_explained() -> None:
    loaded = load()
    hub = Hub(loaded, {"num_blocks": 12, "block_size": 4, "preemption": "swap"}, Limits(prompt_tokens=40))
    try:
        hub.pacer.pause()
        sampling = Sampling(max_new_tokens=16, temperature=0.0)
        prompts = [loaded.tokenizer(text).input_ids for text in ("The old man", "The old man", "She said that the")]
        tickets = [hub.submit("chat", "me", prompt, **sampling.arguments(loaded)) for prompt in prompts]
        explanations = []
        while (explanation := hub.step()) is not None:
            explanations.append(explanation)
        texts = [explanation.text for explanation in explanations]
        chosen: dict[str, str] = {ticket.label: "" for ticket in tickets}
        for text in texts:
            for label in chosen:
                if f"{label} " in text and "chose “" in text.split(f"{label} ", 1)[1].split(". ")[0]:
                    chosen[label] += text.split(f"{label} ", 1)[1].split("chose “", 1)[1].split("”", 1)[0]
        for ticket in tickets:
            reply = loaded.tokenizer.decode(ticket.request.result(5).token_ids[:-1], skip_special_tokens=True)
            assert chosen[ticket.label].replace("⏎", "\n") == reply
        assert any("preempted to make room" in text for text in texts)
        assert any("came back from CPU memory" in text for text in texts)
        assert any("had filled its last block" in text for text in texts)
        assert [each.step for each in explanations] == list(range(explanations[0].step, explanations[-1].step + 1))
    finally:
        hub.close()


def test_a_token_is_quoted_as_text() -> None:
    assert quote("\n\ta") == "“⏎⇥a”"
