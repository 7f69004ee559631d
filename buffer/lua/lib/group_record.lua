-- A group's record: all that is known of it, packed into the field `group` of its hash. It is packed in one fixed order
-- and without names, since it is read and written at every step of a group's life. The hash also has one field per
-- member for its meta, and those of drafts. More than 32 fields would double the table that Lua makes for it.
--   the task      ordinal, n members, pin, reserve (bytes), task, parent, refills
--   its place     state, order (among those ready), deadline
--   its grant     grant (the version it was granted to), attempt (its number; after a loss, from a multiple of
--                 ID_GAP_AFTER_LOSS on), lost (holders)
--   its lease     lease, holder, for_version (that it is leased for)
--   its content   done (a character per member), bytes, ranges, payloads, tokens
--   times         admitted_ms, sealed_ms, leased_ms
--   if used       uses, claimed (the lease of the last claim)
--   if any        drafts (their number), previous_holder (the one that lost it), causes (of members that are not
--                 scored)
--   if set        seal (its number), draw (its part in weighted draws), payload_lost (true where its payloads are gone)
local function read_group(gid)
  local packed = redis.call('HGET', group_key(gid), 'group')
  if not packed then return nil end
  local ordinal, n, pin, reserve, task, parent, refills,
    state, order, deadline, grant, attempt, lost, lease, holder, for_version,
    done, bytes, ranges, payloads, tokens, admitted_ms, sealed_ms, leased_ms,
    uses, claimed, drafts, previous_holder, causes, seal, draw, payload_lost = cmsgpack.unpack(packed)
  return {
    ordinal = ordinal, n = n, pin = pin, reserve = reserve, task = task, parent = parent, refills = refills,
    state = state, order = order, deadline = deadline, grant = grant, attempt = attempt, lost = lost, lease = lease,
    holder = holder, for_version = for_version, done = done, bytes = bytes, ranges = ranges, payloads = payloads,
    tokens = tokens, admitted_ms = admitted_ms, sealed_ms = sealed_ms, leased_ms = leased_ms, uses = uses,
    claimed = claimed, drafts = drafts, previous_holder = previous_holder, causes = causes, seal = seal, draw = draw,
    payload_lost = payload_lost
  }
end

local function packed_group(g)
  return cmsgpack.pack(
    g.ordinal, g.n, g.pin, g.reserve, g.task, g.parent, g.refills,
    g.state, g.order, g.deadline, g.grant, g.attempt, g.lost, g.lease, g.holder, g.for_version,
    g.done, g.bytes, g.ranges, g.payloads, g.tokens, g.admitted_ms, g.sealed_ms, g.leased_ms,
    g.uses, g.claimed, g.drafts, g.previous_holder, g.causes, g.seal, g.draw, g.payload_lost
  )
end

local function save_group(gid, g) redis.call('HSET', group_key(gid), 'group', packed_group(g)) end

-- Groups are numbered by their admission.
local function number_of(gid) return tonumber(string.match(gid, '%d+$')) end

-- Number of its grants, as far as Redis knows.
local function attempts_of(g) return g.attempt % ID_GAP_AFTER_LOSS end

-- True if it waits for its next holder.
local function is_orphan(g) return g.state == 'generating' and g.holder == '' end
