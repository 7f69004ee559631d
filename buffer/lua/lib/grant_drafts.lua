-- Shared by `admit` and `attach`: the drafts from which the holder of a group continues. The versions of their tokens
-- count from now on. A draft with which the group would be over the bound is removed, and its member begins again. A
-- holder that opens its stream again gets its own drafts as well: it may be a new process of the same name.
-- Answer: names joined by ','. The caller saves the group and its deadline.
local function grant_drafts(gid, g)
  local names, dropped = {}, {}
  if not g.drafts then return '' end
  for member = 0, g.n - 1 do
    local draft = read_draft(gid, member)
    if draft then
      local before = g.ranges
      g.ranges = merge_ranges(before, draft.ranges)
      local deadline = deadline_of(g)
      if deadline >= counters.u then
        g.deadline = deadline
        names[#names + 1] = draft.name
      else
        g.ranges = before
        drop_draft(gid, g, member)
        dropped[#dropped + 1] = draft.name
      end
    end
  end
  if #dropped > 0 then redis.call('SADD', table_key .. ':trash', gid .. '|||' .. table.concat(dropped, ',')) end
  return table.concat(names, ',')
end
