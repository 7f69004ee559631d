"""Who may call what: credentials that name role and member, and the table of the verbs each role may call.

What others on the network could reach unprotected is refused, unless `security.allow_insecure` is set, where it would
be opened:

- services without a token: `mesh.rpc.server.check_exposure`
- metrics and endpoints without a key: `mesh.http.server.http_key`
- ranks that torchrun has started: `mesh.runtime.ranks.check_ranks`
- broadcasts of weights: `learner.weights.transports.rendezvous`
- SGLang's copies, and broadcasts to its server: `generators.engines.sglang.server_args.check`
"""
