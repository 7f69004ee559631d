-- Shared by `sample` and `attach`: a leased group as the learner receives it, once `naming_prompts` was there.
local members = {}
local function lease_reply(gid, g)
  -- As text, once for all groups: Redis would print each number again.
  for member = #members, g.n - 1 do members[member + 1] = tostring(member) end
  local metas = redis.call('HMGET', group_key(gid), unpack(members, 1, g.n))
  return {
    gid, g.lease, g.for_version, g.ordinal, attempts_of(g), g.sealed_ms - g.admitted_ms,
    math.max(0, g.leased_ms - g.sealed_ms), g.payloads, metas, use_count(g) + 1,
    g.draw and g.draw.priority and string.format('%.17g', g.draw.priority) or '1',
    g.draw and g.draw.chance and string.format('%.17g', g.draw.chance) or '1', g.bytes
  }
end
