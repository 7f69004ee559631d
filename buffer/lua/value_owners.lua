-- Stored values that live groups own, or may still own. ARGV: gids
-- Answer per group: attempt, done, payloads, names of drafts; nothing for those that are not live
load_table(ARGV[1])
load_run()
local answer = {}
for i = 2, #ARGV do
  local gid = ARGV[i]
  local g = read_group(gid)
  local names = {}
  if g then
    for j, draft in ipairs(drafts_of(gid, g)) do names[j] = draft.name end
  end
  answer[i - 1] = g and {g.attempt, g.done, g.payloads, table.concat(names, ',')} or {}
end
return {'ok', snapshot(), answer}
