-- Ends live groups that can be given to no one: their prompt or payload is gone, or they are too large to be sent.
-- Groups that have been used stay.
-- ARGV: reason, then gid, lease per group
load_table(ARGV[1])
load_run()
free_first()
for i = 3, #ARGV, 2 do
  local g = read_group(ARGV[i])
  if g and g.state ~= 'consumed' and g.lease == ARGV[i + 1] then end_group(ARGV[i], g, 'failed', ARGV[2]) end
end
return {'ok', snapshot()}
