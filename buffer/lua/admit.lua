-- Grants groups to a generator: orphans first (they skip the gate, not the bound), then pending tasks.
-- ARGV: member, generation, incarnation and version it serves, wanted, u as the front knows it, live_limit, token of
-- the stream. Below a demand of live_limit the gate is open to this version.
load_table(ARGV[1])
load_run()
local member, serving_inc, serving = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local wanted, live_limit = tonumber(ARGV[6]), tonumber(ARGV[8])
if generation_of(member) ~= tonumber(ARGV[3]) then return {'old_generation', snapshot()} end
if replaced(member, ARGV[9]) then return {'replaced', snapshot()} end
if serving_inc ~= run.incarnation then return {'other_incarnation', snapshot()} end
if counters.bounded == 1 and tonumber(ARGV[7]) ~= counters.u then return {'moved', snapshot()} end

if suspect() then return {'suspect', snapshot()} end
local now = now_ms()
local grants = {}
local serving_pin = serving_inc .. ':' .. serving

local function grant(gid, g, number)
  if g.attempt > 0 then cancel(gid, g) end
  g.lease, g.previous_holder = new_lease('a'), nil
  g.attempt, g.holder, g.leased_ms = g.attempt + 1, member, now
  local drafts = grant_drafts(gid, g)
  enter(held_by(member), gid, number)
  enter(set_of('deadline'), gid, g.deadline)
  save_group(gid, g)
  grants[#grants + 1] = {gid, g.lease, g.attempt, g.ordinal, g.done, g.parent, drafts}
end

local function regrant(pin)
  for _, gid in ipairs(redis.call('ZRANGE', orphans_key(pin), 0, wanted - 1)) do
    if #grants >= wanted then return end
    local g = read_group(gid)
    g.grant = serving_pin
    g.deadline = deadline_of(g)
    if g.deadline >= counters.u then
      redis.call('ZREM', orphans_key(pin), gid)
      add('orphaned', -1)
      add('readmissions', 1)
      -- Their holders' count, after the attempts of any lost time: those may have left values under their names.
      g.attempt = attempts_of(g) + counters.losses * ID_GAP_AFTER_LOSS
      grant(gid, g, number_of(gid))
    end
  end
end

-- Whether an evaluation is under way. With bound 0 training waits for its end. In one decode batch with held-out
-- prompts its log-probs would depend on the clock, and no run would repeat itself.
local evaluates
local function evaluating()
  if counters.max_staleness > 0 then return false end
  if evaluates == nil then
    local held_out = unpacked(redis.call('HGET', RUN .. ':eval', 'counters'), COUNTERS)
    evaluates = held_out.pending + held_out.generating + held_out.ready + held_out.leased > 0
  end
  return evaluates
end

-- The reason why nothing more may be admitted, or nil.
local function closed(reserve)
  if counters.bounded == 0 then return nil end
  if evaluating() then return 'evaluation' end
  if demand() + counters.samples_per_insert - 1 >= live_limit then return 'gate' end
  if counters.bytes + counters.reserved + reserve > counters.max_bytes then return 'bytes' end
  return nil
end

local reason = ''
local function admit(pin)
  if #grants >= wanted then return end
  local taken, deadline = {}, deadline_of({state = 'generating', ranges = '', grant = serving_pin})
  for _, entry in ipairs(redis.call('ZRANGE', pending_key(pin), 0, wanted - #grants - 1)) do
    local ordinal, n, _, reserve, task, parent, refills = unpack(cmsgpack.unpack(entry))
    reason = closed(reserve) or ''
    if reason ~= '' then break end
    taken[#taken + 1] = entry
    add('seq', 1)
    add('generating', 1)
    add('reserved', reserve)
    local number = tostring(counters.seq)
    local gid = TABLE .. '-' .. number
    local g = {
      state = 'generating', ordinal = ordinal, n = n, pin = pin, reserve = reserve, task = task, parent = parent,
      refills = refills, admitted_ms = now, done = string.rep('0', n), bytes = 0, payloads = '', tokens = 0, sealed_ms = 0,
      order = counters.seq, ranges = '', attempt = 0, lost = 0, lease = '', holder = '', leased_ms = 0, grant = serving_pin,
      for_version = 0, deadline = deadline
    }
    enter(set_of('generating'), gid, number)
    grant(gid, g, number)
  end
  in_bulk('ZREM', pending_key(pin), taken)
  add('pending', -#taken)
  add('first_admissions', #taken)
  add('admitted', #taken)
end

regrant(serving_pin)
regrant('')
admit(serving_pin)
admit('')
if #grants > 0 then redis.call('ZADD', table_key .. ':holders', 'NX', now + counters.lease_ms, member) end
return {'ok', snapshot(), naming_prompts(grants), reason}
