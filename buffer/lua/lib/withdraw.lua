-- Shared by `seed` and `resume`: takes back pending tasks. In a table without bound (evaluation) it also ends the
-- unclaimed groups: their pinned version may not be served any more.
local function withdraw_all()
  local withdrawn = 0
  local pins = redis.call('SMEMBERS', table_key .. ':pins')
  pins[#pins + 1] = ''
  for _, pin in ipairs(pins) do
    for _, entry in ipairs(redis.call('ZRANGE', pending_key(pin), 0, -1)) do
      redis.call('SADD', table_key .. ':trash', '|' .. drop_prompt(cmsgpack.unpack(entry)[1]) .. '||')
      withdrawn = withdrawn + 1
    end
    redis.call('DEL', pending_key(pin))
  end
  redis.call('DEL', table_key .. ':pins')
  add('pending', -withdrawn)
  add('withdrawn', withdrawn)
  if counters.bounded == 0 then
    for _, state in ipairs({'generating', 'ready', 'leased'}) do
      for _, gid in ipairs(redis.call('ZRANGE', set_of(state), 0, -1)) do
        finish(gid, read_group(gid), 'failed', 'withdrawn', false)
      end
    end
  end
  return withdrawn
end
