-- Limits in Redis: the arithmetic of limits/policy/rate_limit.py, one call, atomic.
--
-- Before this text the store puts `local function now_s() ... end`: the clock, which is Redis's own
-- (TIME), so that gateways need not agree on theirs. Argument and answer are msgpack, one each.
--
--   KEYS[1]  BASE:state        hash: epoch, run_id, began_at, ready (1: budgets can be told), and who
--                              restores: by, until
--   BASE:EPOCH:gateways        sorted set: gateway -> until when it is alive
--   BASE:EPOCH:graves          sorted set: dead gateway -> until when its requests may cost money
--   BASE:EPOCH:open:G          hash: id of a reservation -> what it took, of gateway G
--   BASE:EPOCH:count:NAME      hash. A rate: t (sum), o (no slot is older), n (newest slot), and one
--                              field a slot. Places: t. Money: p (latest period), t (spent in it
--                              and reserved), r (reserved), b (an earlier period), u (spent in it).
--                              All: a (what was before is counted)
--
-- BASE is a hash tag: a request draws on counts of its key, its tenant, its model and the whole
-- gateway at once, so they have to lie in one slot of a cluster.
--
-- An epoch ends where counts may be lost: there is no state, or another run of Redis than the one
-- that made it (it may have come back with an older snapshot). Nothing of an earlier epoch is ever
-- looked at again; it expires.

local SLOTS = 120
local CONCURRENCY_RETRY_S = 1
local KEEP_S = 40 * 86400  -- money: longer than any period, from the last draw on
local OPEN_S = 2 * 86400  -- lists of reservations: gateways touch theirs every second
local STATE = KEYS[1]
local BASE = string.sub(STATE, 1, -6)  -- without "state"
local EPOCH, GATEWAYS, GRAVES, OPEN  -- set below, where the state is read

local function int(x) return string.format('%.0f', x) end
local function key_of(name) return EPOCH .. 'count:' .. name end
local function open_of(gateway) return EPOCH .. 'open:' .. gateway end
local function slot_of(window_s, at_s) return math.floor(at_s * SLOTS / window_s) end
local function expires_s(window_s, slot) return (slot + 1) * window_s / SLOTS + window_s end

-- Rates and places -------------------------------------------------------------------------------

local function amounts(key, first, last)
  local names = {}
  for slot = first, last do names[#names + 1] = int(slot) end
  return redis.call('HMGET', key, unpack(names)), names
end

-- As Count.expire. At most SLOTS + 2 slots lie between o and n.
local function load_count(name, window_s, at_s)
  local c = {key = key_of(name), w = window_s, t = 0}
  local had = redis.call('HMGET', c.key, 't', 'o', 'n')
  if not had[1] then return c end
  c.t = tonumber(had[1])
  if window_s == 0 then return c end
  c.o, c.n = tonumber(had[2]), tonumber(had[3])
  if expires_s(window_s, c.n) <= at_s then
    redis.call('DEL', c.key)
    return {key = c.key, w = window_s, t = 0}
  end
  local alive = c.o
  while expires_s(window_s, alive) <= at_s do alive = alive + 1 end
  if alive > c.o then
    local gone, names = amounts(c.key, c.o, alive - 1)
    for _, amount in ipairs(gone) do if amount then c.t = c.t - tonumber(amount) end end
    redis.call('HDEL', c.key, unpack(names))
    c.o = alive
    redis.call('HSET', c.key, 't', int(c.t), 'o', int(c.o))
  end
  return c
end

local function charge(c, slot, amount, at_s)
  redis.call('HINCRBY', c.key, int(slot), int(amount))
  c.t = c.t + amount
  c.o = math.min(c.o or slot, slot)
  c.n = math.max(c.n or slot, slot)
  redis.call('HSET', c.key, 't', int(c.t), 'o', int(c.o), 'n', int(c.n))
  redis.call('PEXPIRE', c.key, int(math.ceil((expires_s(c.w, c.n) - at_s) * 1000) + 1000))
end

local function take_count(c, cost, at_s)
  if c.w == 0 then
    c.t = c.t + cost
    redis.call('HINCRBY', c.key, 't', int(cost))
    redis.call('EXPIRE', c.key, OPEN_S)
    return 0
  end
  local slot = math.max(c.n or 0, slot_of(c.w, at_s))
  charge(c, slot, cost, at_s)
  return slot
end

local function wait_count(c, draw, at_s)  -- as Count.wait_s; nil: never
  if draw.cost == 0 then return 0 end
  if draw.cost > draw.limit then return nil end
  local excess = c.t + draw.cost - draw.limit
  if excess <= 0 then return 0 end
  if c.w == 0 then return CONCURRENCY_RETRY_S end
  local slot = c.o
  for i, amount in ipairs((amounts(c.key, c.o, c.n))) do
    slot = c.o + i - 1
    if amount then excess = excess - tonumber(amount) end
    if excess <= 0 then break end
  end
  return expires_s(c.w, slot) - at_s
end

local function reset_count(c, at_s)
  if not c.n then return 0 end
  for slot = c.n, c.o, -1 do
    local amount = redis.call('HGET', c.key, int(slot))
    if amount and amount ~= '0' then return math.max(0, expires_s(c.w, slot) - at_s) end
  end
  return 0
end

local function correct(taken, amount)
  local key = key_of(taken.name)
  if taken.window_s == 0 then
    if redis.call('EXISTS', key) == 1 and redis.call('HINCRBY', key, 't', int(amount)) <= 0 then
      redis.call('DEL', key)
    end
  elseif redis.call('HEXISTS', key, int(taken.slot)) == 1 then
    redis.call('HINCRBY', key, int(taken.slot), int(amount))
    redis.call('HINCRBY', key, 't', int(amount))
  end
end

-- Money ------------------------------------------------------------------------------------------

local function save_spend(s)
  redis.call('HSET', s.key, 'p', int(s.p), 't', int(s.t), 'r', int(s.r), 'b', int(s.b),
             'u', int(s.u))
  redis.call('EXPIRE', s.key, KEEP_S)
end

local function load_spend(name, period)  -- as Spend.roll
  local s = {key = key_of(name)}
  local had = redis.call('HMGET', s.key, 'p', 't', 'r', 'b', 'u')
  s.asked = period
  if not had[1] then
    s.p, s.t, s.r, s.b, s.u, s.is_new = period, 0, 0, 0, 0, true
    return s
  end
  s.p, s.t, s.r = tonumber(had[1]), tonumber(had[2]), tonumber(had[3])
  s.b, s.u = tonumber(had[4] or 0), tonumber(had[5] or 0)
  if period > s.p then
    s.b, s.u = s.p, s.t - s.r
    s.p, s.t = period, s.r
    save_spend(s)
  end
  return s
end

local function used_spend(s)  -- as Spend.used_of; nil: the period is not counted here
  if s.asked == s.p then return s.t end
  if s.asked == s.b then return s.u + s.r end
  return nil
end

local function add_spend(s, spent, period)  -- as Spend.add, on what was loaded for the period
  if period == s.p then s.t = s.t + spent
  elseif period == s.b then s.u = s.u + spent end
end

local function wait_spend(s, draw)
  if draw.cost == 0 or used_spend(s) + draw.cost <= draw.limit then return 0 end
  if draw.cost > draw.limit then return nil end
  return draw.resets_in_s
end

local function close_spend(taken, used, period)
  if redis.call('EXISTS', key_of(taken.name)) == 0 then return end
  local s = load_spend(taken.name, period)
  s.t, s.r = s.t - taken.cost, s.r - taken.cost
  add_spend(s, used, period > 0 and period or s.p)
  save_spend(s)
end

-- Either -----------------------------------------------------------------------------------------

local function load(draw, at_s)
  if draw.meter == 'cost' then return load_spend(draw.name, draw.period) end
  return load_count(draw.name, draw.window_s, at_s)
end

local function take(count, draw, at_s)
  local slot
  if draw.meter == 'cost' then
    count.t, count.r, slot = count.t + draw.cost, count.r + draw.cost, count.asked
    save_spend(count)
  else
    slot = take_count(count, draw.cost, at_s)
  end
  return {name = draw.name, meter = draw.meter, window_s = draw.window_s, slot = slot,
          cost = draw.cost, kind = draw.kind}
end

local function figures_of(counts, draws, at_s)
  local figures = {}
  for i, draw in ipairs(draws) do
    local reset_s = draw.resets_in_s
    if draw.meter ~= 'cost' then reset_s = reset_count(counts[i], at_s) end
    local used = counts[i].t
    if draw.meter == 'cost' then used = used_spend(counts[i]) or draw.limit end
    figures[i] = {limit = draw.limit, remaining = math.max(0, draw.limit - used),
                  reset_s = reset_s}
  end
  return figures
end

local function close(taken, used, state)
  for _, one in ipairs(taken) do
    if one.meter == 'cost' then
      -- What was posted before the epoch is restored from the ledger, if it was not yet: who is
      -- still open when that has been done is posted later.
      local counts = used and (state.ready or used.posted_at >= state.began_at)
      local nanos = counts and used.cost_nanos or 0
      local period = used and (one.kind == 'month' and used.month or used.day) or 0
      close_spend(one, nanos, period)
    else
      local amount = 0
      if used and one.meter ~= 'concurrency' then
        if one.meter == 'input_tokens' then amount = used.input_tokens
        elseif one.meter == 'output_tokens' then amount = used.output_tokens
        elseif one.meter == 'tokens' then amount = used.input_tokens + used.output_tokens
        else amount = 1 end
      end
      correct(one, amount - one.cost)
    end
  end
end

-- The calls --------------------------------------------------------------------------------------

local calls = {}

function calls.reserve(args, at_s, state)
  local draws, counts = args.draws, {}
  local held = redis.call('HGET', OPEN, args.id)
  for i, draw in ipairs(draws) do counts[i] = load(draw, at_s) end
  if held then return {taken = cmsgpack.unpack(held), figures = figures_of(counts, draws, at_s)} end
  for _, count in ipairs(counts) do  -- known from here on, from 0
    if count.is_new then save_spend(count) end
  end
  local at, longest, never
  for i, draw in ipairs(draws) do
    local wait_s
    if draw.meter ~= 'cost' then wait_s = wait_count(counts[i], draw, at_s)
    elseif args.fail_open and not state.ready then wait_s = 0
    elseif not state.ready then return {unknown = i - 1, figures = {}}
    elseif not used_spend(counts[i]) then return {unknown = i - 1, is_past = true, figures = {}}
    else wait_s = wait_spend(counts[i], draw) end
    if not wait_s and not never then at, never = i, true
    elseif wait_s and wait_s > 0 and not never and (not longest or wait_s > longest) then
      at, longest = i, wait_s
    end
  end
  if at then
    local used = counts[at].t
    if draws[at].meter == 'cost' then used = used_spend(counts[at]) end
    return {refused = at - 1, used = used, wait_s = not never and longest or nil,
            figures = figures_of(counts, draws, at_s)}
  end
  local taken = {}
  for i, draw in ipairs(draws) do taken[i] = take(counts[i], draw, at_s) end
  redis.call('HSET', OPEN, args.id, cmsgpack.pack(taken))
  redis.call('EXPIRE', OPEN, OPEN_S)
  return {taken = taken, figures = figures_of(counts, draws, at_s)}
end

function calls.close(args, at_s, state)
  for _, one in ipairs(args.ended) do
    local held = redis.call('HGET', OPEN, one.id)
    if held then
      redis.call('HDEL', OPEN, one.id)
      close(cmsgpack.unpack(held), one.used, state)
    end
  end
  return {}
end

function calls.figures(args, at_s)
  local counts = {}
  for i, draw in ipairs(args.draws) do counts[i] = load(draw, at_s) end
  return {figures = figures_of(counts, args.draws, at_s)}
end

-- As MemoryStore.carry.
function calls.carry(args, at_s)
  for _, one in ipairs(args.reservations) do
    if redis.call('HEXISTS', OPEN, one.id) == 0 then
      local taken = {}
      for i, t in ipairs(one.taken) do
        local draw = {name = t.name, meter = t.meter, window_s = t.window_s, cost = t.cost,
                      kind = t.kind, period = t.slot}
        taken[i] = take(load(draw, at_s), draw, at_s)
      end
      redis.call('HSET', OPEN, one.id, cmsgpack.pack(taken))
      redis.call('EXPIRE', OPEN, OPEN_S)
    end
  end
  return {}
end

local function has_past(name)
  if redis.call('EXISTS', key_of(name)) == 1 then redis.call('HSET', key_of(name), 'a', '1') end
end

-- What open reservations drew on these counts: {slot, cost} by name. One look for all of them.
local function open_draws(pasts)
  local by_name = {}
  for _, past in ipairs(pasts) do
    if past.window_s > 0 then by_name[past.name] = {} end
  end
  if not next(by_name) then return by_name end
  for _, gateway in ipairs(redis.call('ZRANGE', GATEWAYS, 0, -1)) do
    for _, held in ipairs(redis.call('HVALS', open_of(gateway))) do
      for _, taken in ipairs(cmsgpack.unpack(held)) do
        local draws = by_name[taken.name]
        if draws then draws[#draws + 1] = {taken.slot, taken.cost} end
      end
    end
  end
  return by_name
end

local function restore_rate(past, at_s, drawn)
  local w, by_slot, first, last, total = past.window_s, {}, nil, nil, 0
  local function put(slot, amount)
    by_slot[slot] = (by_slot[slot] or 0) + amount
    first, last = math.min(first or slot, slot), math.max(last or slot, slot)
    total = total + amount
  end
  for _, pair in ipairs(past.amounts) do
    local slot = slot_of(w, at_s - pair[1])
    if expires_s(w, slot) > at_s then put(last and math.max(last, slot) or slot, pair[2]) end
  end
  local old = load_count(past.name, w, at_s)
  if old.n then
    for _, draw in ipairs(drawn) do
      if expires_s(w, draw[1]) > at_s then put(draw[1], draw[2]) end
    end
    if old.t > total then return end
  end
  redis.call('DEL', old.key)
  if not first then return end
  local fields = {'t', int(total), 'o', int(first), 'n', int(last)}
  for slot, amount in pairs(by_slot) do
    fields[#fields + 1] = int(slot)
    fields[#fields + 1] = int(amount)
  end
  redis.call('HSET', old.key, unpack(fields))
  redis.call('PEXPIRE', old.key, int(math.ceil((expires_s(w, last) - at_s) * 1000) + 1000))
end

function calls.restore(args, at_s)
  local drawn = open_draws(args.pasts)
  for _, past in ipairs(args.pasts) do
    if past.window_s > 0 then
      restore_rate(past, at_s, drawn[past.name])
    else
      local s = load_spend(past.name, past.period)  -- as Spend.restore
      if s.p == past.period then s.t = math.max(s.t, past.spent + s.r)
      elseif s.b == past.period then s.u = math.max(s.u, past.spent)
      else s.b, s.u = past.period, past.spent end
      save_spend(s)
    end
    has_past(past.name)
  end
  return {}
end

-- As MemoryStore.add; with `is_past`, when it was. A named bundle that comes again, because its
-- answer was lost, is counted once.
function calls.add(args, at_s)
  local seen = args.bundle and EPOCH .. 'added:' .. args.bundle
  if seen and not redis.call('SET', seen, '1', 'NX', 'EX', OPEN_S) then return {} end
  for _, past in ipairs(args.pasts) do
    if past.window_s > 0 then
      local c = load_count(past.name, past.window_s, at_s)
      for _, pair in ipairs(past.amounts) do
        local slot = slot_of(c.w, at_s - (args.is_past and pair[1] or 0))
        if not args.is_past then slot = math.max(c.n or slot, slot) end
        if expires_s(c.w, slot) > at_s then charge(c, slot, pair[2], at_s) end
      end
    else
      local s = load_spend(past.name, past.period)
      add_spend(s, past.spent, past.period)
      save_spend(s)
    end
  end
  return {}
end

-- Gateways, and what is left of those that are gone ----------------------------------------------

local function all_of(gateway)
  local flat, by_id = redis.call('HGETALL', open_of(gateway)), {}
  for i = 1, #flat, 2 do by_id[flat[i]] = flat[i + 1] end
  return by_id
end

-- Their places are free at once. What they may still be billed for is counted until the ledger has
-- closed it (by the same id), or for `orphan_s`. What they drew on rates leaves with its window.
local function reap(gateway, forgets, state)
  local open, left = open_of(gateway), 0
  for id, held in pairs(all_of(gateway)) do
    local taken, kept = cmsgpack.unpack(held), {}
    for _, one in ipairs(taken) do
      if one.meter == 'cost' and not forgets then kept[#kept + 1] = one
      elseif one.meter == 'cost' or one.meter == 'concurrency' then close({one}, nil, state) end
    end
    if #kept == 0 then redis.call('HDEL', open, id)
    else
      left = left + 1
      if #kept < #taken then redis.call('HSET', open, id, cmsgpack.pack(kept)) end
    end
  end
  return left
end

-- Every second from every gateway: it is alive, and who is not any more is cleared up.
function calls.beat(args, at_s, state)
  redis.call('ZADD', GATEWAYS, at_s + args.lease_s, args.gateway)
  redis.call('ZREM', GRAVES, args.gateway)  -- it was only silent: it closes its own
  redis.call('EXPIRE', GATEWAYS, OPEN_S)
  redis.call('EXPIRE', OPEN, OPEN_S)
  local dead = redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', at_s, 'LIMIT', 0, 1)[1]
  if dead then
    if reap(dead, false, state) > 0 then
      redis.call('ZADD', GRAVES, at_s + args.orphan_s, dead)
      redis.call('EXPIRE', GRAVES, OPEN_S)
    end
    redis.call('ZREM', GATEWAYS, dead)
  end
  local forgotten = redis.call('ZRANGEBYSCORE', GRAVES, '-inf', at_s, 'LIMIT', 0, 1)[1]
  if forgotten then
    reap(forgotten, true, state)
    redis.call('ZREM', GRAVES, forgotten)
  end
  local live = redis.call('ZCOUNT', GATEWAYS, string.format('(%.17g', at_s), '+inf')
  return {num_gateways = live, ready = state.ready, began_at = state.began_at}
end

-- A gateway has started: what its earlier life held is dead. Answers what is still counted of it.
function calls.start(args, at_s, state)
  redis.call('ZREM', GRAVES, args.gateway)
  reap(args.gateway, false, state)
  return {ids = redis.call('HKEYS', OPEN)}
end

function calls.own() return {ids = redis.call('HKEYS', OPEN)} end

-- Who restores counts: nobody where budgets can be told, one at a time otherwise.
function calls.claim(args, at_s, state)
  if state.ready or at_s < state.began_at + args.grace_s then return {} end
  local had = redis.call('HMGET', STATE, 'by', 'until')
  if had[1] and had[1] ~= args.gateway and tonumber(had[2]) > at_s then return {} end
  redis.call('HSET', STATE, 'by', args.gateway, 'until', string.format('%.17g', at_s + args.lock_s))
  return {began_at = state.began_at}
end

-- That, in pieces; `done` comes with the last. A count that has its past already (field a) is left
-- alone, so that a second try after half of it, or by another, counts nothing twice.
function calls.restore_loss(args, at_s, state)
  if state.ready or redis.call('HGET', STATE, 'by') ~= args.gateway then return {} end
  local missing = {}
  for _, past in ipairs(args.pasts) do
    if not redis.call('HGET', key_of(past.name), 'a') then missing[#missing + 1] = past end
  end
  calls.add({pasts = missing, is_past = true}, at_s)
  for _, past in ipairs(missing) do has_past(past.name) end
  if args.done then redis.call('HSET', STATE, 'ready', '1') end
  return {}
end

-- The epoch --------------------------------------------------------------------------------------

local function state_of(args, at_s)
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
  local had = redis.call('HMGET', STATE, 'epoch', 'run_id', 'began_at', 'ready')
  local begins = not had[1] or had[2] ~= run_id
  if begins and not args.fresh then return nil end
  if begins then
    had = {args.fresh, run_id, string.format('%.17g', at_s), '0'}
    redis.call('DEL', STATE)
    redis.call('HSET', STATE, 'epoch', had[1], 'run_id', run_id, 'began_at', had[3], 'ready', '0')
  end
  return {epoch = had[1], began_at = tonumber(had[3]), ready = had[4] == '1'}
end

-- Several calls in one, one after the other; each is answered by itself. `fresh` names the epoch
-- that begins where there is none: then whoever calls does not know it yet.
local args = cmsgpack.unpack(ARGV[1])
local at_s = now_s()
local state = state_of(args, at_s)
local answers = {}
if state then
  EPOCH = BASE .. state.epoch .. ':'
  GATEWAYS, GRAVES = EPOCH .. 'gateways', EPOCH .. 'graves'
  OPEN = EPOCH .. 'open:' .. args.gateway
end
for i, call in ipairs(args.calls) do
  if state and (args.fresh or call.epoch == state.epoch) then
    call.gateway = args.gateway
    answers[i] = calls[call.call](call, at_s, state)
    answers[i].at_s, answers[i].epoch = at_s, state.epoch
  else
    answers[i] = {lost = true}
  end
end
return cmsgpack.pack(answers)
