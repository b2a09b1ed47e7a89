-- Kept answers in Redis: one call of these each, atomic. Vectors of Redis's own vector sets are the
-- caller's (VADD, VSIM and VREM run in threads only outside a script).
--
--   BASE:state                  hash: run (Redis's run id), base, purges, seq, and how often what has
--                               been invalidated: t:TENANT, m:MODEL
--   BASE:B:count, bytes, clock, cursor  hashes by tenant; B is the state's base
--   BASE:B:TENANT:e:ID          an entry; it expires by itself
--   BASE:B:TENANT:worth         sorted set of what is kept, by worth
--   BASE:B:TENANT:c:COUNTS:MODEL  what comparisons taught (gateway/cache/calibrations.py), of COUNTS,
--                               the latter 8 bytes of `valid`: the rule (16 bytes), then three
--                               arrays in MessagePack; it expires when it is no longer used
--   BASE:B:TENANT:s:SET         a scope's members: a vector set, or (is_plain) a sorted set of ids by
--                               when they were added
--
-- BASE ends in a hash tag: all keys lie in one slot. ID: 16 bytes of the exact key. SET: 16 bytes,
-- a digest of scope and epoch, so that what was invalidated lies in no set that is looked into.
--
-- An entry:  valid (16)  SET (16, zeros: none)  size (4)  and, each with its length (4) before it,
--            confidence, vector, names  and the rest, which only gateways read (its layout has a
--            number there, and gateways of two versions miss each other's)
-- A member of worth:  ID  SET  size     (all that is to be known once the entry is gone)
-- An epoch:  base (8)  tenant's count (4)  model's (4)  purges (4); its first 16 bytes are `valid`
--
-- The state is of one run of Redis: one that was started again may have come back without the last
-- invalidations, so nothing it brought back is looked at; it expires. Every answer begins with the
-- epoch and the members (SET ID) that are to be taken out of vector sets.

local STATE = KEYS[1]
local BASE = string.sub(STATE, 1, -6)
local call, fresh, is_plain, tenant, model = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4], ARGV[5]
local NO_SET = string.rep('\0', 16)
local SUM_NAMES = {'bytes', 'count', 'clock', 'cursor'}
local LOOK = 4  -- members that one `keep` looks at, in turn, for entries that have ended
local SLICE = 128  -- entries looked through by one `drop` or `search`

local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
local had = redis.call('HMGET', STATE, 'run', 'base', 'purges', 't:' .. tenant, 'm:' .. model)
if had[1] ~= run then
  if had[2] then
    redis.call('UNLINK', STATE)
    for _, sum in ipairs(SUM_NAMES) do redis.call('UNLINK', BASE .. had[2] .. ':' .. sum) end
  end
  redis.call('HSET', STATE, 'run', run, 'base', fresh, 'purges', 0, 'seq', 0)
  had = {run, fresh, 0, false, false}
end

local base = had[2]
local SUMS = BASE .. base .. ':'
local OWN = SUMS .. tenant .. ':'
local gone = {}

local function valid_of(model_count)
  return base .. struct.pack('>I4I4', tonumber(had[4] or 0), tonumber(model_count or 0))
end
local valid = valid_of(had[5])
local epoch = valid .. struct.pack('>I4', tonumber(had[3] or 0))

local function key_of(id) return OWN .. 'e:' .. id end
local function member_of(id, value) return id .. string.sub(value, 17, 36) end
local function size_of(member) return (struct.unpack('>I4', string.sub(member, 33, 36))) end
local function clock() return tonumber(redis.call('HGET', SUMS .. 'clock', tenant) or 0) end
local function exactly(x) return string.format('%.17g', x) end

local function part(value, at)  -- the first byte of one with its length before it, and its last
  local length = struct.unpack('>I4', string.sub(value, at, at + 3))
  return at + 4, at + 3 + length
end

local function vector_of(value)
  local _, last = part(value, 37)
  local at, to = part(value, last + 1)
  return string.sub(value, at, to), to
end

local function names_of(value)  -- entry_id, key_id, model_name, question
  local _, last = vector_of(value)
  return cmsgpack.unpack(string.sub(value, part(value, last + 1)))
end

local function leave(set, id)  -- the scope's members
  if set == NO_SET then return end
  if is_plain then
    redis.call('ZREM', OWN .. 's:' .. set, id)
  else
    gone[#gone + 1] = set .. id
  end
end

local function forget_sums()
  for _, sum in ipairs(SUM_NAMES) do redis.call('HDEL', SUMS .. sum, tenant) end
end

local function forget(member)  -- what is counted; the entry itself is gone already
  if redis.call('ZREM', OWN .. 'worth', member) == 0 then return end
  redis.call('HINCRBY', SUMS .. 'bytes', tenant, -size_of(member))
  if redis.call('HINCRBY', SUMS .. 'count', tenant, -1) <= 0 then forget_sums() end
  leave(string.sub(member, 17, 32), string.sub(member, 1, 16))
end

local function remove(id, value)
  redis.call('UNLINK', key_of(id))
  forget(member_of(id, value))
end

-- An entry that may be served. One that is not listed is not: no purge would find it. (A Redis
-- that is short of memory may have dropped any of these keys.)
local function get(id)
  local value = redis.call('GET', key_of(id))
  if not value then return false end
  local is_listed = redis.call('ZSCORE', OWN .. 'worth', member_of(id, value))
    and redis.call('HEXISTS', SUMS .. 'count', tenant) == 1
  if is_listed and string.sub(value, 1, 16) == valid then return value end
  remove(id, value)
  return false
end

local function last_until(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end

-- What has expired is counted until its turn comes: all of a tenant's entries are looked at while
-- a quarter as many are added. (A second set, by end, would be exact and take 150 bytes an entry.)
local function forget_ended()
  local cursor = redis.call('HGET', SUMS .. 'cursor', tenant) or '0'
  local slice = redis.call('ZSCAN', OWN .. 'worth', cursor, 'COUNT', LOOK)
  for i = 1, #slice[2], 2 do
    local member = slice[2][i]
    if redis.call('EXISTS', key_of(string.sub(member, 1, 16))) == 0 then forget(member) end
  end
  redis.call('HSET', SUMS .. 'cursor', tenant, slice[1])
end

local calls = {}

function calls.epoch() return {} end

function calls.find(id) return {get(id)} end

function calls.fetch(set, ...)
  local values = {}
  for i, id in ipairs({...}) do
    local value = get(id)
    if value and string.sub(value, 17, 32) ~= set then value = false end
    if not value then leave(set, id) end
    values[i] = value
  end
  return values
end

function calls.keep(asked, id, value, ttl_ms, cost, max_bytes)
  if asked ~= epoch then return {0} end
  if redis.call('EXISTS', OWN .. 'worth') == 0 then forget_sums() end
  forget_ended()
  local old = redis.call('GET', key_of(id))
  local member, size = member_of(id, value), size_of(member_of(id, value))
  if old then
    remove(id, old)
    local again = string.sub(value, 17, 32) .. id
    if gone[#gone] == again then gone[#gone] = nil end
  end
  if size > max_bytes then return {0} end
  redis.call('SET', key_of(id), value, 'PX', ttl_ms)
  redis.call('ZADD', OWN .. 'worth', exactly(clock() + math.max(1, cost) / size), member)
  last_until(OWN .. 'worth', ttl_ms)
  local set = string.sub(value, 17, 32)
  if is_plain and set ~= NO_SET then
    redis.call('ZADD', OWN .. 's:' .. set, redis.call('HINCRBY', STATE, 'seq', 1), id)
    last_until(OWN .. 's:' .. set, ttl_ms)
  end
  redis.call('HINCRBY', SUMS .. 'count', tenant, 1)
  local num_bytes = redis.call('HINCRBY', SUMS .. 'bytes', tenant, size)
  while num_bytes > max_bytes do
    local least = redis.call('ZRANGE', OWN .. 'worth', 0, 0, 'WITHSCORES')
    if not least[1] then break end
    redis.call('HSET', SUMS .. 'clock', tenant, exactly(math.max(clock(), tonumber(least[2]))))
    redis.call('UNLINK', key_of(string.sub(least[1], 1, 16)))
    forget(least[1])
    num_bytes = num_bytes - size_of(least[1])
  end
  return {1}
end

function calls.use(id, saved)
  local value = get(id)
  if not value then return {0} end
  local member = member_of(id, value)
  local worth = redis.call('ZSCORE', OWN .. 'worth', member)
  if not worth then return {0} end
  worth = math.max(tonumber(worth), clock()) + math.max(1, saved) / size_of(member)
  redis.call('ZADD', OWN .. 'worth', exactly(worth), member)
  return {1}
end

function calls.learn(id, entry_id, was, now)
  local value = get(id)
  if not value or names_of(value)[1] ~= entry_id then return {0} end
  local at, to = part(value, 37)
  if string.sub(value, at, to) ~= was then return {0} end
  local rest = string.sub(value, to + 1)
  value = string.sub(value, 1, 36) .. struct.pack('>I4', #now) .. now .. rest
  redis.call('SET', key_of(id), value, 'KEEPTTL')
  return {1}
end

function calls.bump()
  if tenant ~= '' then redis.call('HINCRBY', STATE, 't:' .. tenant, 1) end
  if model ~= '' then redis.call('HINCRBY', STATE, 'm:' .. model, 1) end
  redis.call('HINCRBY', STATE, 'purges', 1)
  return {}
end

-- Of some entries of the tenant those that are old or selected; its next cursor and how many.
function calls.drop(cursor, by_name, wanted_model, wanted_key, wanted_question)
  local slice = redis.call('ZSCAN', OWN .. 'worth', cursor, 'COUNT', SLICE)
  local counts, num_dropped = {}, 0
  for i = 1, #slice[2], 2 do
    local id = string.sub(slice[2][i], 1, 16)
    local value = redis.call('GET', key_of(id))
    if value then
      local _, key, name, question = unpack(names_of(value))
      if counts[name] == nil then counts[name] = redis.call('HGET', STATE, 'm:' .. name) end
      local is_old = string.sub(value, 1, 16) ~= valid_of(counts[name])
      local is_meant = by_name == '1' and (wanted_model == '' or wanted_model == name)
        and (wanted_key == '' or wanted_key == key)
        and (wanted_question == '' or wanted_question == question)
      if is_old or is_meant then
        remove(id, value)
        num_dropped = num_dropped + 1
      end
    else
      forget(slice[2][i])
    end
  end
  return {slice[1], num_dropped}
end

-- Of some entries of the tenant those of a request, of a model ('': of any): id, value, ...
function calls.search(cursor, wanted_entry, wanted_model)
  local slice = redis.call('ZSCAN', OWN .. 'worth', cursor, 'COUNT', SLICE)
  local counts, found = {}, {}
  for i = 1, #slice[2], 2 do
    local id = string.sub(slice[2][i], 1, 16)
    local value = redis.call('GET', key_of(id))
    if value then
      local entry, _, name = unpack(names_of(value))
      if counts[name] == nil then counts[name] = redis.call('HGET', STATE, 'm:' .. name) end
      if string.sub(value, 1, 16) == valid_of(counts[name])
        and (wanted_entry == '' or wanted_entry == entry)
        and (wanted_model == '' or wanted_model == name) then
        found[#found + 1] = id
        found[#found + 1] = value
      end
    end
  end
  return {slice[1], found}
end

function calls.since(set, after, limit)  -- plain: members added later, with their vectors
  local key = OWN .. 's:' .. set
  local found = {redis.call('ZCARD', key)}
  local added = redis.call(
    'ZRANGEBYSCORE', key, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #added, 2 do
    local value = get(added[i])
    local vector = ''
    if value then
      vector = vector_of(value)
    else
      redis.call('ZREM', key, added[i])
    end
    found[#found + 1] = {added[i], added[i + 1], vector}
  end
  return found
end

local function taught_key() return OWN .. 'c:' .. string.sub(valid, 9) .. ':' .. model end

-- Add counts ('': none) to what was taught under this rule. When there are more comparisons than
-- `memory`, all counts are halved, as cache_confidence.py has it.
function calls.teach(asked, rule, added, memory, ttl_ms)
  if string.sub(asked, 1, 16) ~= valid then return {0, ''} end
  local key = taught_key()
  local value = redis.call('GET', key)
  local counts = value and string.sub(value, 1, #rule) == rule and string.sub(value, #rule + 1) or ''
  if added ~= '' then
    local sums, num = cmsgpack.unpack(added), 0
    local had_sums = counts ~= '' and cmsgpack.unpack(counts)
    for i, row in ipairs(sums) do
      for j = 1, #row do
        if had_sums then row[j] = row[j] + had_sums[i][j] end
        if i <= 2 then num = num + row[j] end
      end
    end
    if num > memory then
      for _, row in ipairs(sums) do
        for j = 1, #row do row[j] = row[j] / 2 end
      end
    end
    counts = cmsgpack.pack(sums)
    redis.call('SET', key, rule .. counts, 'PX', ttl_ms)
  elseif value then
    redis.call('PEXPIRE', key, ttl_ms)
  end
  return {1, counts}
end

function calls.unteach()
  redis.call('UNLINK', taught_key())
  return {}
end

function calls.tenants() return redis.call('HKEYS', SUMS .. 'count') end

function calls.size()
  local num_entries, num_bytes = 0, 0
  for _, n in ipairs(redis.call('HVALS', SUMS .. 'count')) do num_entries = num_entries + n end
  for _, n in ipairs(redis.call('HVALS', SUMS .. 'bytes')) do num_bytes = num_bytes + n end
  return {num_entries, num_bytes}
end

local args = {}
for i = 6, #ARGV do args[#args + 1] = ARGV[i] end
if call == 'keep' then
  for i = 4, 6 do args[i] = tonumber(args[i]) end
elseif call == 'use' then
  args[2] = tonumber(args[2])
elseif call == 'teach' then
  for i = 4, 5 do args[i] = tonumber(args[i]) end
end
local answer = calls[call](unpack(args))
return {epoch, gone, answer}
