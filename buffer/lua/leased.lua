-- Shared by `sample` and `attach`: a leased group as the learner is told of it.
local function leased_group(gid, g)
  local metas = {}
  for member = 0, tonumber(g.n) - 1 do metas[member + 1] = g['meta:' .. member] or '' end
  return {
    gid, g.lease, tonumber(g.for_version), tonumber(g.ordinal), tonumber(g.attempt),
    tonumber(g.sealed_ms) - tonumber(g.admitted_ms), math.max(0, tonumber(g.leased_ms) - tonumber(g.sealed_ms)),
    g.payloads, metas
  }
end
