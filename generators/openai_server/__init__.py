"""An OpenAI-compatible endpoint on the generator: chat and text completions of the weights in service.

Agents that know nothing of the mesh talk to it. Their samples in a session are recorded token by token, so that they
can be trained.
"""
