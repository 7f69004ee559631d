"""Access control: credentials that name role and member, and the table of the verbs that each role may call.

Services that other hosts could reach unprotected are refused where they would open, unless `security.allow_insecure`
is set:

- services without a token: `mesh.rpc.server.check_exposure`
- metrics and endpoints without a key: `mesh.http.server.http_key`
- ranks that torchrun has started: `mesh.runtime.ranks.check_ranks`
- broadcasts of weights: `learner.weights.transports.rendezvous`
- SGLang's copies, and broadcasts to its server: `generators.engines.sglang.server_args.check`
"""
