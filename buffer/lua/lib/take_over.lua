-- Shared by `resume` and `reassert`: an incarnation resumes from version k. Uses below k are trained, later ones undone.
-- Returns groups trained, ready again, evicted. Looks at every live group, on purpose: a takeover is one step, and with
-- discarded versions the age of any group may change. The gate and the byte budget limit how many there are.
local function take_over(incarnation, k, member, learner_until)
  redis.call('HSET', RUN, 'incarnation', incarnation, 'version', k, 'committed', k,
    'learner', member, 'learner_until', learner_until, 'finished', 0)
  redis.call('HSET', RUN .. ':takeovers', incarnation, k)
  load_run()
  ancestors = {}
  put('u', k)
  -- The incarnation is part of what fronts see of a table: they must be notified even if no counter changes.
  touch()
  record_progress()

  -- Uses at or after k are undone.
  local function undo(g)
    local kept = {}
    for _, version in ipairs(g.uses or {}) do
      if version < k then kept[#kept + 1] = version end
    end
    set_uses(g, kept, g.state == 'consumed', g.state == 'consumed')
  end

  local trained, returned, evicted = 0, 0, 0
  for _, gid in ipairs(redis.call('ZRANGE', set_of('leased'), 0, -1)) do
    local g = read_group(gid)
    undo(g)
    make_ready(gid, g)
    save_group(gid, g)
  end
  apply_moves()
  -- Tokens of versions that are discarded now have grown older.
  for _, set in ipairs({'deadline', 'reuse'}) do
    for _, gid in ipairs(redis.call('ZRANGE', table_key .. ':' .. set, 0, -1)) do
      local g = read_group(gid)
      undo(g)
      redis.call('ZREM', table_key .. ':' .. set, gid)
      g.deadline = deadline_of(g)
      if g.state == 'ready' and counters.order == FRESHEST then
        set_order(gid, g)
        redis.call('ZADD', set_of('ready'), g.order, gid)
      end
      redis.call('ZADD', waiting_set(g), g.deadline, gid)
      save_group(gid, g)
    end
  end
  for _, gid in ipairs(redis.call('ZRANGE', set_of('consumed'), 0, -1)) do
    local g = read_group(gid)
    undo(g)
    local over = deadline_of(g) < k
    if g.uses and g.payload_lost then
      -- It stays until the commit: further uses may be said of it.
      redis.call('ZADD', set_of('consumed'), last_use(g), gid)
      save_group(gid, g)
    elseif g.uses and (over or use_count(g) >= counters.max_reuse) then
      finish(gid, g, 'trained', 'committed', false)
      trained = trained + 1
    elseif g.payload_lost then
      -- A prompt that was to be passed over is seeded like any other now.
      redis.call('HDEL', table_key .. ':used', g.ordinal)
      finish(gid, g, 'failed', 'payload_lost', false)
    elseif over then
      finish(gid, g, 'evicted_stale', 'resumed', true)
      evicted = evicted + 1
    else
      add('spent', spent(g))
      make_ready(gid, g)
      save_group(gid, g)
      returned = returned + 1
    end
  end
  apply_moves()
  redis.call('HDEL', table_key .. ':streams', 'learner')
  -- The rest of the old learner's term is not the new one's.
  redis.call('ZREM', table_key .. ':holders', 'learner')
  return trained, returned, evicted
end
