-- A generator gives up groups; members written so far stay. ARGV: member, generation,
-- token of the stream that speaks for it ('' where it does so itself), then gid, lease per group
load_table(ARGV[1])
load_run()
if generation_of(ARGV[2]) ~= tonumber(ARGV[3]) then return {'old_generation', snapshot()} end
if replaced(ARGV[2], ARGV[4]) then return {'replaced', snapshot()} end
local released = 0
for i = 5, #ARGV, 2 do
  local gid = ARGV[i]
  local g = read_group(gid)
  if g and g.state == 'generating' and g.holder == ARGV[2] and g.lease == ARGV[i + 1] then
    release_lease(gid, g, 0)
    released = released + 1
  end
end
return {'ok', snapshot(), released}
