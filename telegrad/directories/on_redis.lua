-- One operation on the directory of one group. Redis runs a script atomically, and writes its effects to the AOF as one
-- transaction. on_redis.py describes the keys.

local STATE, ENTRIES, ORDER, ENDS, TTLS, HELD, HISTORY = unpack(KEYS)
local operation, incarnation, seen, kept = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local call = redis.call

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local revision = tonumber(call('HGET', STATE, 'revision') or 0)

local function text(number) -- tostring() would round from 10^14 on
    return string.format('%.0f', number)
end

-- Entries ---------------------------------------------------------------------

-- A record is "REVISION CREATED LEASE VALUE"; redis_messages.py parses it too.
local function parsed(record)
    if not record then
        return '0', nil, '0'
    end
    return string.match(record, '^(%d+) (%d+) (%d+) ')
end

local function let_go(key, lease)
    if lease ~= '0' then
        call('ZREM', HELD, lease .. '\0' .. key)
    end
end

local function write(key, value, lease)
    revision = call('HINCRBY', STATE, 'revision', 1)
    local _, created, former = parsed(call('HGET', ENTRIES, key))
    local record = text(revision) .. ' ' .. (created or text(revision)) .. ' ' .. lease .. ' ' .. value
    call('HSET', ENTRIES, key, record)
    call('ZADD', ORDER, 0, key)
    let_go(key, former)
    if lease ~= '0' then
        call('ZADD', HELD, 0, lease .. '\0' .. key)
    end
    call('XADD', HISTORY, 'MAXLEN', kept, text(revision) .. '-0', 'key', key, 'record', record)
    return record
end

local function delete(key)
    revision = call('HINCRBY', STATE, 'revision', 1)
    local _, _, lease = parsed(call('HGET', ENTRIES, key))
    call('HDEL', ENTRIES, key)
    call('ZREM', ORDER, key)
    let_go(key, lease)
    call('XADD', HISTORY, 'MAXLEN', kept, text(revision) .. '-0', 'key', key)
end

-- Leases ----------------------------------------------------------------------

local function end_lease(id)
    for _, held in ipairs(call('ZRANGEBYLEX', HELD, '[' .. id .. '\0', '(' .. id .. '\1')) do
        delete(string.sub(held, #id + 2))
    end
    call('ZREM', ENDS, id)
    call('HDEL', TTLS, id)
end

local function sweep()
    for _, id in ipairs(call('ZRANGEBYSCORE', ENDS, '-inf', text(now))) do
        end_lease(id)
    end
end

-- After a restart of the server: no worker could renew meanwhile, so each lease gets its full TTL again.
local function prolong_all()
    for _, id in ipairs(call('ZRANGE', ENDS, 0, -1)) do
        call('ZADD', ENDS, 'GT', text(now + tonumber(call('HGET', TTLS, id))), id)
    end
end

local function until_next_end() -- milliseconds, rounded up; -1: no lease
    local next_end = call('ZRANGE', ENDS, 0, 0, 'WITHSCORES')[2]
    return next_end and math.max(1, math.ceil((tonumber(next_end) - now) / 1000)) or -1
end

-- Operations ------------------------------------------------------------------

local operations = {}

function operations.grant(ttl)
    local id = call('HINCRBY', STATE, 'leases', 1)
    call('ZADD', ENDS, text(now + tonumber(ttl)), text(id))
    call('HSET', TTLS, text(id), ttl)
    return {'done', revision, id}
end

function operations.renew(id)
    if not call('ZSCORE', ENDS, id) then
        return {'lease lost', revision}
    end
    call('ZADD', ENDS, text(now + tonumber(call('HGET', TTLS, id))), id)
    return {'done', revision}
end

function operations.revoke(id)
    end_lease(id)
    return {'done', revision}
end

function operations.write(key, expected, lease, value)
    if lease ~= '0' and not call('ZSCORE', ENDS, lease) then
        return {'lease lost', revision}
    end
    local found = call('HGET', ENTRIES, key)
    if parsed(found) ~= expected then
        return {'differs', revision, found}
    end
    local record = write(key, value, lease)
    return {'done', revision, record}
end

function operations.delete(key, expected, lease)
    if lease ~= '0' and not call('ZSCORE', ENDS, lease) then
        return {'lease lost', revision}
    end
    local found = call('HGET', ENTRIES, key)
    if parsed(found) ~= expected then
        return {'differs', revision, found}
    end
    if found then
        delete(key)
    end
    return {'done', revision, false}
end

function operations.list(prefix)
    local found = {}
    for _, key in ipairs(call('ZRANGEBYLEX', ORDER, '[' .. prefix, '(' .. prefix .. '\255')) do -- UTF-8 never has a byte 255
        found[#found + 1] = {key, call('HGET', ENTRIES, key)}
    end
    return {'done', revision, found}
end

-- Each revision has one element of the stream, until MAXLEN drops it. Read to the end, or until `count` elements of the
-- prefix are found. Return the revision to watch from, the changes, and the time until the next lease ends.
function operations.watch(prefix, since, count)
    if tonumber(since) > revision then
        return {'reset', revision}
    end
    local oldest = call('XRANGE', HISTORY, '-', '+', 'COUNT', 1)[1]
    if tonumber(since) + 1 < (oldest and tonumber(string.match(oldest[1], '^%d+')) or revision + 1) then
        return {'compacted', revision}
    end
    local found, last, page = {}, since, nil
    repeat
        page = call('XRANGE', HISTORY, '(' .. last .. '-0', '+', 'COUNT', count)
        for _, element in ipairs(page) do
            local fields = element[2]
            last = string.match(element[1], '^%d+')
            if string.sub(fields[2], 1, #prefix) == prefix then
                found[#found + 1] = {tonumber(last), fields[2], fields[4] or false}
            end
        end
    until #page == 0 or #found > 0
    return {'done', revision, tonumber(last), found, until_next_end()}
end

-- The first operation of each connection. The first connection ever creates the state and deletes remains of an old one.
if operation == 'attach' then
    local run, fresh = ARGV[5], ARGV[6]
    if incarnation == '' and call('HSETNX', STATE, 'incarnation', fresh) == 1 then
        call('DEL', ENTRIES, ORDER, ENDS, TTLS, HELD, HISTORY)
        call('HSET', STATE, 'run', run)
    end
    incarnation = incarnation == '' and call('HGET', STATE, 'incarnation') or incarnation
end
if incarnation ~= call('HGET', STATE, 'incarnation') or seen > revision then
    return {'reset', revision}
end
if operation == 'attach' then
    if call('HGET', STATE, 'run') ~= ARGV[5] then
        call('HSET', STATE, 'run', ARGV[5])
        prolong_all()
    end
    return {'done', revision, incarnation}
end
-- A failing script is not rolled back. If memory or the disk is full, or this server has become a replica, Redis refuses
-- the first write of a script, but none after it. So the first write changes nothing. It also stops a replica from
-- answering a list.
call('HSETNX', STATE, 'incarnation', '')
sweep()
return operations[operation](unpack(ARGV, 5))
