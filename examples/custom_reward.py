"""Reward functions in the two signatures that most people have already written. Name them in the configuration:

reward:
  functions: ["examples/custom_reward.py:compute_score", "examples/custom_reward.py:group_diversity"]

Several functions are summed; each shows up as a component of the reward under its name.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: one response at a time; a float, or a dict with "score" and further parts."""
    answer = solution_str.strip()
    correct = float(answer == str(ground_truth))
    return {"score": correct, "is_number": float(answer.lstrip("-").isdigit())}


def group_diversity(prompts, completions, **columns):
    """TRL's signature: a whole group at a time, columns of the dataset as lists; None where there is no opinion."""
    if len(completions) < 2:
        return [None] * len(completions)
    return [0.1 * (1 - (completions.count(text) - 1) / (len(completions) - 1)) for text in completions]
