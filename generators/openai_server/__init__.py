"""An OpenAI-compatible endpoint on the generator: chat and text completions of the weights in service.

Agents that know nothing of the mesh talk to it; what they sample in a session is recorded token by token, so that it
can be trained.
"""
