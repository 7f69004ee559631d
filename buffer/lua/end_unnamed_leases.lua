-- Ends the leases that a holder has not named in its inventory. It keeps those of the listed groups that it holds under
-- a lease named here; the others are taken from it. A generator that has forgotten a group counts as a lost holder.
-- ARGV: holder, generation (generators) or incarnation (`learner`), token of the stream, then gid, lease pairs. A group
-- has a pair with each lease that is named for it, or with '' where none is.
-- Answer: number of groups taken, and the pairs with a dead lease. If a group waits for its next holder, the last one
-- still writes.
load_table(ARGV[1])
load_run()
free_first()
local holder = ARGV[2]
local no = outdated(holder, tonumber(ARGV[3]))
if no then return {no, snapshot()} end
if replaced(holder, ARGV[4]) then return {'replaced', snapshot()} end
local groups, order, alive, dead, taken = {}, {}, {}, {}, 0
for i = 5, #ARGV, 2 do
  local gid, lease = ARGV[i], ARGV[i + 1]
  if groups[gid] == nil then
    groups[gid] = read_group(gid) or false
    order[#order + 1] = gid
  end
  local g = groups[gid]
  if g and g.holder == holder and g.lease == lease then
    alive[gid] = true
  elseif lease ~= '' and not (g and is_orphan(g) and g.lease == lease) then
    dead[#dead + 1] = {gid, lease}
  end
end
for _, gid in ipairs(order) do
  local g = groups[gid]
  if g and g.holder == holder and not alive[gid] then
    end_lease(gid, g, 1)
    taken = taken + 1
  end
end
return {'ok', snapshot(), taken, dead}
