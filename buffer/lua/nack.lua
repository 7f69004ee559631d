-- Gives leased groups back. ARGV: incarnation, disposition (release, filter, fail), reason, different reasons that are
-- counted at most, then gid, lease per group
load_table(ARGV[1])
load_run()
free_first()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, snapshot()} end
-- Reasons are free, their number is not: each is read whenever the table's values are.
local disposition, reason, most = ARGV[3], ARGV[4], tonumber(ARGV[5])
local counted = (disposition == 'filter' and 'filtered/' or 'failed/') .. reason
if redis.call('HLEN', table_key .. ':reasons') >= most and redis.call('HEXISTS', table_key .. ':reasons', counted) == 0 then
  reason = 'other'
end
local changed = 0
for i = 6, #ARGV, 2 do
  local gid = ARGV[i]
  local g = read_group(gid)
  if g and g.state == 'leased' and g.lease == ARGV[i + 1] then
    if disposition == 'release' then
      make_ready(gid, g)
      save_group(gid, g)
    elseif disposition == 'filter' then
      end_group(gid, g, 'filtered', reason)
    else
      end_group(gid, g, 'failed', reason)
    end
    changed = changed + 1
  end
end
return {'ok', snapshot(), changed}
