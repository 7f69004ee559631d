-- Ends groups that can no longer train within the bound: ready ones, and those still being generated.
-- Their prompts are queued again. ARGV: portion
load_table(ARGV[1])
load_run()
free_first()
if suspect() then return {'ok', snapshot(), 0, 0} end
local limit = '(' .. counters.u
local gids, left = {}, 0
if counters.bounded == 1 then
  gids = redis.call('ZRANGEBYSCORE', table_key .. ':deadline', '-inf', limit, 'LIMIT', 0, tonumber(ARGV[2]))
end
for _, gid in ipairs(gids) do
  local g = read_group(gid)
  finish(gid, g, 'evicted_stale', g.state == 'ready' and 'over_bound' or 'hopeless', true)
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
return {'ok', snapshot(), #gids, left}
