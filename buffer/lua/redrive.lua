-- Queues prompts of failed groups again, as new groups with a parent, each note once. ARGV: gids
-- Answer: number queued, gids whose prompt is not kept (any more)
load_table(ARGV[1])
load_run()
local queued, unknown = 0, {}
for i = 2, #ARGV do
  local gid = ARGV[i]
  local text = redis.call('HGET', T .. ':dead', gid)
  local note = text and cjson.decode(text)
  if note and note.kept then
    local entry = cjson.encode({note.ordinal, note.n, note.pin, note.reserve, note.task, gid, 0})
    redis.call('ZADD', pending_key(note.pin), note.ordinal, entry)
    if note.pin ~= '' then redis.call('SADD', T .. ':pins', note.pin) end
    note.kept, note.redriven = false, true
    redis.call('HSET', T .. ':dead', gid, cjson.encode(note))
    add('pending', 1)
    add('seeded_tasks', 1)
    add('redriven', 1)
    queued = queued + 1
  else
    unknown[#unknown + 1] = gid
  end
end
return {'ok', view(), queued, unknown}
