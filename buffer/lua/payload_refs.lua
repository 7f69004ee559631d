-- Where the payloads of live groups are: `member:attempt,...` per group, '' for those that are not. ARGV: gids
load_table(ARGV[1])
load_run()
local answer = {}
for i = 2, #ARGV do
  local g = read_group(ARGV[i])
  answer[#answer + 1] = g and g.payloads or ''
end
return {'ok', snapshot(), answer}
