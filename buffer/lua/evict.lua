-- Ends groups that can no longer train within the bound: ready ones, and those still being generated.
-- Their prompts are queued again. ARGV: portion
-- Answer: a row per group (gid, members, ms since its admission, reason), and how many are left.
load_table(ARGV[1])
load_run()
free_first()
if suspect() then return {'ok', snapshot(), {}, 0} end
local limit = '(' .. counters.u
local now = now_ms()
local gids, ended, left = {}, {}, 0
if counters.bounded == 1 then
  gids = redis.call('ZRANGEBYSCORE', table_key .. ':deadline', '-inf', limit, 'LIMIT', 0, tonumber(ARGV[2]))
end
for _, gid in ipairs(gids) do
  local g = read_group(gid)
  local reason = g.state == 'ready' and 'over_bound' or 'hopeless'
  ended[#ended + 1] = {gid, g.n, now - g.admitted_ms, reason}
  finish(gid, g, 'evicted_stale', reason, true)
end
if counters.bounded == 1 then
  -- A group that has been used before is not evicted: it ends as trained, when that use is committed.
  for _, gid in ipairs(redis.call('ZRANGEBYSCORE', table_key .. ':reuse', '-inf', limit, 'LIMIT', 0, tonumber(ARGV[2]))) do
    retire(gid, read_group(gid))
  end
  apply_moves()
  left = redis.call('ZCOUNT', table_key .. ':deadline', '-inf', limit)
    + redis.call('ZCOUNT', table_key .. ':reuse', '-inf', limit)
end
return {'ok', snapshot(), ended, left}
