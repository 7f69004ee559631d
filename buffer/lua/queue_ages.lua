-- Ages and sizes of the queue. Changes nothing, reads a bounded number of groups.
-- Answer: ages in ms, groups that leases hold, failed groups kept, bytes that wait for a commit, bytes set aside,
-- greatest ordinal seeded. The ages are of the oldest group being generated, and of the oldest of the ready groups that
-- are next in order.
load_table(ARGV[1])
local now = now_ms()
local function oldest(state, field, count)
  local age = 0
  for _, gid in ipairs(redis.call('ZRANGE', set_of(state), 0, count - 1)) do
    local g = read_group(gid)
    if g then age = math.max(age, now - g[field]) end
  end
  return age
end
-- Those being generated are in the order of their admission, those that are ready may be in any.
return {
  'ok', oldest('generating', 'admitted_ms', 1), oldest('ready', 'sealed_ms', 16),
  counters.generating - counters.orphaned + counters.leased, redis.call('LLEN', table_key .. ':failures'),
  counters.consumed_bytes, counters.reserved, counters.seeded
}
