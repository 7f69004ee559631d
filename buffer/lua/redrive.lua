-- Queues prompts of failed groups again, as new groups with a parent, each note once. ARGV: gids
-- Answer: number queued, gids without a kept prompt
load_table(ARGV[1])
load_run()
local queued, unknown = 0, {}
for i = 2, #ARGV do
  local gid = ARGV[i]
  local text = redis.call('HGET', table_key .. ':dead', gid)
  local note = text and cjson.decode(text)
  if note and note.kept then
    redrive(gid, note)
    queued = queued + 1
  else
    unknown[#unknown + 1] = gid
  end
end
return {'ok', snapshot(), queued, unknown}
