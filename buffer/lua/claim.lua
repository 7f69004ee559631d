-- Turns leased groups into consumed ones before the optimizer step that uses them: all or none. Those that may be used
-- again are ready again at once. A group that was claimed before, under the same lease and at the same version, is
-- passed over: repeating a claim that succeeded succeeds.
-- ARGV: incarnation, train_version, then gid, lease per group.
-- Answer: claimed, refusals (gid, why, lease), whether a checkpoint is wanted
load_table(ARGV[1])
load_run()
free_first()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, snapshot()} end
local version = tonumber(ARGV[3])
-- True if groups that wait for a commit hold so much of the budget that a checkpoint should be written early.
local function checkpoint_wanted() return counters.consumed_bytes * 2 > counters.max_bytes and 1 or 0 end
local refused, fresh, seen = {}, {}, {}
for i = 4, #ARGV, 2 do
  local gid, lease = ARGV[i], ARGV[i + 1]
  local g = read_group(gid)
  local why = nil
  local claimed = g and g.uses and g.claimed == lease
  local alive = g and g.lease == lease and g.state == 'leased'
  if not claimed and not alive then
    why = 'lease_lost'
  elseif seen[gid] then
    why = 'listed_twice'
  elseif claimed then
    if last_use(g) ~= version then why = 'claimed_at_' .. last_use(g) end
  elseif g.uses and last_use(g) >= version then
    why = 'claimed_at_' .. last_use(g)
  elseif g.deadline < version then
    why = 'over_bound'
  end
  if why then
    refused[#refused + 1] = {gid, why, lease}
  elseif not claimed then
    fresh[#fresh + 1] = {gid, g}
  end
  -- A lease that is dead says nothing against one of the same group that is alive.
  if claimed or alive then seen[gid] = true end
end
if #refused > 0 then return {'ok', snapshot(), 0, refused} end
if #fresh == 0 then return {'ok', snapshot(), 1, {}, checkpoint_wanted()} end
local untimely = version < counters.u and 'version_claimed' or version > counters.u and 'version_ahead'
if counters.bounded == 1 and untimely then
  for i, pair in ipairs(fresh) do refused[i] = {pair[1], untimely, pair[2].lease} end
  return {'ok', snapshot(), 0, refused}
end
record_progress()
for _, pair in ipairs(fresh) do
  local gid, g = pair[1], pair[2]
  local uses = g.uses or {}
  local again = #uses + 1 < counters.max_reuse and g.deadline > version
  g.claimed = g.lease
  local before = spent(g)
  uses[#uses + 1] = version
  g.uses = uses
  add('uses', 1)
  add('spent', (again and spent(g) or 0) - before)
  if again then
    make_ready(gid, g)
  else
    leave(set_of('leased'), gid)
    enter(set_of('consumed'), gid, ARGV[3])
    g.state, g.holder = 'consumed', ''
    add('leased', -1)
    add('consumed', 1)
    add('consumed_bytes', g.bytes)
  end
  save_group(gid, g)
end
if counters.bounded == 1 then put('u', version + 1) end
return {'ok', snapshot(), 1, {}, checkpoint_wanted()}
