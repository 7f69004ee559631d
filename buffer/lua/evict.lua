-- Ends groups that can no longer train within the bound: ready ones, and those still being generated.
-- Their prompts are queued again. ARGV: portion
load_table(ARGV[1])
load_run()
free_first()
if suspect() then return {'ok', view(), 0, 0} end
local limit = '(' .. C.u
local gids, left = {}, 0
if C.bounded == 1 then
  gids = redis.call('ZRANGEBYSCORE', T .. ':deadline', '-inf', limit, 'LIMIT', 0, tonumber(ARGV[2]))
end
for _, gid in ipairs(gids) do
  local g = read_group(gid)
  finish(gid, g, 'evicted_stale', g.state == 'ready' and 'over_bound' or 'hopeless', true)
end
if C.bounded == 1 then
  -- What has been used before is not evicted: it ends as trained, when that use is committed.
  for _, gid in ipairs(redis.call('ZRANGEBYSCORE', T .. ':reuse', '-inf', limit, 'LIMIT', 0, tonumber(ARGV[2]))) do
    retire(gid, read_group(gid))
  end
  settle()
  left = redis.call('ZCOUNT', T .. ':deadline', '-inf', limit) + redis.call('ZCOUNT', T .. ':reuse', '-inf', limit)
end
return {'ok', view(), #gids, left}
