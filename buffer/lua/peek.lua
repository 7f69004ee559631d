-- What the policy needs to choose a batch; changes nothing. ARGV: for_version, count
-- Answer: ready candidates {gid, deadline} (the first in order, and the most urgent), live unclaimed and unleased
-- groups per deadline from for_version on (cumulative), leases for for_version, leases for earlier versions
load_table(ARGV[1])
load_run()
local version, count = tonumber(ARGV[2]), tonumber(ARGV[3])
local seen, ids = {}, {}
local function consider(gid)
  if not seen[gid] then
    seen[gid] = true
    ids[#ids + 1] = gid
  end
end
for _, gid in ipairs(redis.call('ZRANGE', set_of('ready'), 0, count - 1)) do consider(gid) end
if C.ready > count and C.bounded == 1 then
  for _, gid in ipairs(redis.call('ZRANGE', T .. ':deadline', 0, count - 1)) do
    if redis.call('ZSCORE', set_of('ready'), gid) then consider(gid) end
  end
end
local candidates = {}
for i, gid in ipairs(ids) do
  candidates[i] = {gid, tonumber(redis.call('ZSCORE', T .. ':deadline', gid)),
    tonumber(redis.call('ZSCORE', set_of('ready'), gid))}
end
local live = {}
if C.bounded == 1 then
  for later = 0, C.max_staleness do
    if later > 0 and later * C.groups_per_step >= C.generating + C.ready then break end
    live[#live + 1] = redis.call('ZCOUNT', T .. ':deadline', '-inf', version + later)
  end
end
local taken = redis.call('ZCOUNT', set_of('leased'), version, version)
local earlier = redis.call('ZCOUNT', set_of('leased'), '-inf', '(' .. version)
return {'ok', view(), candidates, live, taken, earlier}
