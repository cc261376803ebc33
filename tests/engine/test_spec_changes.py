import json

from dataservice.engine.spec_changes import in_words, misgrown, spec_changes


def changed(before: object, after: object) -> list[str]:
    return [str(each) for each in spec_changes(json.dumps(before), json.dumps(after))]


def test_keys_are_named_with_both_values():
    before = {"plan": {"memory_tokens": 512, "cost": {"llm": {"a": 1}}}, "epochs": 1}
    after = {"plan": {"memory_tokens": 1024, "cost": {"llm": {"a": 2}}}, "epochs": 1}
    assert changed(before, after) == ["plan.cost.llm.a: 1 → 2", "plan.memory_tokens: 512 → 1024"]


def test_sources_go_by_their_names_and_their_order_counts():
    a, b = {"name": "a", "weight": 1.0}, {"name": "b", "weight": 2.0}
    assert changed({"sources": [a, b]}, {"sources": [a, {**b, "weight": 3.0}]}) == [
        "sources.b.weight: 2.0 → 3.0"
    ]
    assert changed({"sources": [a, b]}, {"sources": [b, a]}) == ['sources: ["a", "b"] → ["b", "a"]']


def test_of_a_source_that_is_new_or_gone_its_url_and_weight_are_told():
    a = {"name": "a", "url": "x", "weight": 1.0, "format": "jsonl", "columns": {"text": "t"}}
    b = {**a, "name": "b", "weight": 0.0}
    assert changed({"sources": [a]}, {"sources": [a, b]}) == [
        'sources: ["a"] → ["a", "b"]',
        'sources.b.url: - → "x"',
        "sources.b.weight: - → 0.0",
    ]
    assert changed({"sources": [a, b]}, {"sources": [a]})[1:] == [
        'sources.b.url: "x" → -',
        "sources.b.weight: 0.0 → -",
    ]


def test_how_sources_and_changes_may_grow_is_told_where_they_did_not():
    a, b, c = ({"name": name, "weight": float(name != "c")} for name in "abc")
    one, two = ({"from_epoch": epoch, "weights": {"a": 0.5}} for epoch in (1, 2))

    def told(sources, changes):
        before = {"sources": [a, b], "mixture_changes": [one]}
        after = {"sources": sources, "mixture_changes": changes}
        return misgrown(json.dumps(before), json.dumps(after))

    assert told([a, b, c], [one, two]) == ""
    assert told([a, b], [one]) == ""
    assert told([a, c, b], [one]).startswith("Its sources are a, c, b, those of the job a, b: keep")
    assert told([a, c], [one]).startswith("Source 'b' is missing: a source stays in its job")
    assert told([a, b, {**c, "weight": 2}], [one]).startswith("Source 'c' is new and has weight 2:")
    assert told([a, b, c], [two, one]).startswith("Its mixture_changes differ from the job's: keep")


def test_error_budgets_and_plans_are_not_data_and_paths_may_be():
    before = {"sources": [{"name": "a", "url": "x", "error_budget": None}], "batch": 1, "seed": 0}
    after = {"sources": [{"name": "a", "url": "y", "error_budget": {"rate": 1}}], "batch": 2}
    of_data = {each.path: each.of_data for each in spec_changes(*map(json.dumps, (before, after)))}
    assert of_data == {
        ("batch",): False,
        ("seed",): True,
        ("sources", "a", "error_budget"): False,
        ("sources", "a", "error_budget", "rate"): False,
        ("sources", "a", "url"): True,
    }


def test_a_sources_loss_weight_may_change_and_the_column_of_its_samples_weights_is_data():
    before = {"sources": [{"name": "a", "loss_weight": 1.0, "columns": {"loss_weight": ""}}]}
    after = {"sources": [{"name": "a", "loss_weight": 0.5, "columns": {"loss_weight": "score"}}]}
    of_data = {
        each.path[2:]: each.of_data for each in spec_changes(*map(json.dumps, (before, after)))
    }
    assert of_data == {("loss_weight",): False, ("columns", "loss_weight"): True}


def test_what_weights_mean_and_how_they_change_is_data():
    before = {"weights": "passes", "mixture_changes": []}
    after = {"weights": "tokens", "mixture_changes": [{"from_step": 3, "weights": {"a": 1.0}}]}
    changes = spec_changes(json.dumps(before), json.dumps(after))
    assert {each.path: each.of_data for each in changes} == {
        ("mixture_changes",): True,
        ("weights",): True,
    }


def test_many_changes_and_long_values_are_told_in_short():
    changes = spec_changes("{}", json.dumps({f"k{n:02d}": "v" * 500 for n in range(30)}))
    assert in_words(changes).endswith(", and 22 more")
    assert len(in_words(changes)) < 1000
